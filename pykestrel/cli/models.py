"""Opening a model for a command: which one, with a progress bar, and the demo model."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..units import show_bytes
from .terminal import Terminal

if TYPE_CHECKING:
    from ..model import Model


def model_name(args: Namespace, terminal: Terminal, *, demo: bool = False) -> str:
    """What ``--model`` says, or with ``demo`` the name of the demo model.

    The demo model is fetched once: after a question on a terminal, with --yes without one. A script
    that neither names a model nor says --yes must not download 98 MB unasked.
    """
    if args.model:
        return str(args.model)
    if not demo:
        raise UsageError("no model given; name one with --model (or PYKESTREL_MODEL)")
    from ..pull import CATALOG, DEMO, demo_path

    path = demo_path()
    if path is not None:
        terminal.note(f"no --model given: using the demo model {DEMO} ({path})")
        return DEMO
    entry = CATALOG[DEMO]
    offer = f"the demo model {DEMO} ({show_bytes(entry.bytes)}, {entry.license})"
    if not args.yes:
        if not (terminal.interactive and sys.stderr.isatty()):
            raise UsageError(f"no model given; name one with --model, or fetch {offer} with --yes")
        if not terminal.ask(f"No model given. Fetch {offer}?"):
            raise UsageError("no model given; name one with --model")
    fetch(DEMO, terminal)
    return DEMO


def fetch(name: str, terminal: Terminal) -> str:
    """Pull a model with a progress bar; the path it can be loaded from."""
    from ..pull import pull

    if not terminal.fancy_err:  # the bar says it better
        terminal.note(f"fetching {name} ...")
    with terminal.progress(f"fetching {name}") as report:
        path = pull(name, report)
    return str(path)


def open_model(
    args: Namespace,
    terminal: Terminal,
    *,
    name: str | None = None,
    quant: str | None = None,
    ctx_size: int | None = None,
    cpu_cache: int | None = None,
) -> Model:
    """Load the model that the flags name; keyword arguments replace flags."""
    from ..model import load

    name = name or model_name(args, terminal)
    template = getattr(args, "chat_template", None)
    with terminal.progress("loading") as report:
        model = load(
            name,
            device=args.device or "auto",
            quant=quant or args.quant,
            ctx_size=args.ctx_size if ctx_size is None else ctx_size,
            kv=args.kv or "int8",
            cpu_cache=args.cpu_cache if cpu_cache is None else cpu_cache,
            chat_template=None if template is None else Path(template),
            progress=report,
        )
    terminal.detail(
        f"{model.name}: {model.quant}, context {model.ctx_size}, K/V {model.kv}, "
        f"on {model.engine.name}, loaded in {model.load_s:.1f} s"
    )
    return model
