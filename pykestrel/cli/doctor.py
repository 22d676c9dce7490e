"""Say what this installation can run on, and why: library, GPU, driver, memory, versions.

The exit code is 0 when only the CPU can be used, and 1 for a broken installation. With --model it
also says whether that model would have room here, without loading it.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from importlib import import_module

from .flags import COMMON, CTX_SIZE, JSON, KV, MODEL, QUANT
from .options import Option, Parser, add_groups
from .terminal import Terminal


def configure(parser: ArgumentParser) -> list[Option]:
    model = (MODEL, QUANT, CTX_SIZE, KV)
    return add_groups(parser, {"model": model, "output": (JSON, *COMMON)})


def _advice() -> dict[str, str | None]:
    """Every variable that could be meant: name -> None, or for one that is not read what is."""
    from .main import COMMANDS

    advice: dict[str, str | None] = {}
    for module, _ in COMMANDS.values():
        parser = Parser(prog="pykestrel")
        for option in import_module(f".{module}", __package__).configure(parser):
            for flag in (*option.flags, *option.off, *(flag for flag, _ in option.aliases)):
                name = "PYKESTREL_" + flag.lstrip("-").replace("-", "_").upper()
                advice.setdefault(name, f"{flag} is set by {_setting(option, flag)}")
            advice[option.env] = None
    return advice


def _setting(option: Option, flag: str) -> str:
    value = dict(option.aliases).get(flag) or ("0" if flag in option.off else "")
    return f"{option.env}={value}" if value else option.env


def run(args: Namespace, terminal: Terminal) -> int:
    from .. import doctor

    result = doctor.report(_advice())
    if args.model is not None and result["engine"] != "none":
        result["model"] = doctor.model_report(
            args.model, args.quant, args.ctx_size, args.kv or "int8"
        )
    if args.json:
        terminal.json(result)
    else:
        terminal.line(doctor.render(result).rstrip("\n"))
    return doctor.exit_code(result)
