"""Write a model directory that loads without quantising.

It holds the weights as q8, q4 or bf16, and copies of the configuration, tokenizer and chat
template. It appears whole or not at all.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..errors import UsageError
from ..units import show_bytes
from .flags import COMMON, FORCE, MODEL
from .models import model_name
from .options import Option, add_groups, one_of
from .options import text as plain_text
from .terminal import Terminal

QUANT = Option(("--quant",), "q8, q4 or bf16", one_of("bf16", "q8", "q4"), "KIND", default="q8")


def configure(parser: ArgumentParser) -> list[Option]:
    parser.add_argument("source", nargs="?", metavar="MODEL", help="what --model takes")
    parser.add_argument("out", metavar="OUT", help="the directory to write")
    return add_groups(parser, {"model": (MODEL, QUANT, FORCE), "output": COMMON})


def run(args: Namespace, terminal: Terminal) -> int:
    if args.source is not None:
        if "model" in args.given:
            raise UsageError("the model was given twice: with --model and without a flag")
        args.model = args.source
    out = Path(plain_text(args.out, "OUT")).expanduser()

    from ..loading import resolve_model, save_quantized

    source = resolve_model(model_name(args, terminal))
    quant = args.quant or "q8"
    started = time.perf_counter()
    with terminal.progress(f"quantising to {quant}") as report:
        save_quantized(source, out, quant, force=bool(args.force), progress=report)
    size = sum(file.stat().st_size for file in out.iterdir() if file.is_file())
    seconds = time.perf_counter() - started
    terminal.note(f"{source.name} as {quant}: {show_bytes(size)} in {seconds:.0f} s")
    terminal.line(str(out))
    return 0
