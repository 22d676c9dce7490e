"""Say what this installation can run on, and why: library, GPU, driver, memory, versions.

The exit code is 0 when only the CPU can be used, and 1 for a broken installation.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from .flags import COMMON, JSON
from .options import Option, add_groups
from .terminal import Terminal


def configure(parser: ArgumentParser) -> list[Option]:
    return add_groups(parser, {"output": (JSON, *COMMON)})


def run(args: Namespace, terminal: Terminal) -> int:
    from .. import doctor

    result = doctor.report()
    if args.json:
        terminal.line(json.dumps(result, ensure_ascii=False))
    else:
        terminal.line(doctor.render(result).rstrip("\n"))
    return doctor.exit_code(result)
