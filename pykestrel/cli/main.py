"""From argv to a command and an exit code.

Exit codes: 0 done, 1 failed while running, 2 wrong usage, 3 CUDA asked for but unusable,
130 interrupted. An error is one line on stderr; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..environment import switched_on
from ..errors import KestrelError, UsageError
from ..files import reason
from ..threads import before_numpy
from .flags import DEBUG
from .models import is_model
from .options import Parser, as_flags, close_to, exclude, resolve_all, split_words
from .terminal import Terminal, drop_stdout, prepare_streams, write_stdout

COMMANDS = {  # name: (module, one line)
    "run": ("run", "answer a prompt, or talk to a model"),
    "bench": ("bench", "measure prefill and decode speed"),
    "quantize": ("quantize", "write a directory that loads without quantising"),
    "pull": ("pull", "fetch a model into the cache"),
    "info": ("info", "say what a model holds and what it would need"),
    "tokenize": ("tokenize", "turn text into token ids, or back"),
    "perplexity": ("perplexity", "score a text, also side by side at several quantisations"),
    "doctor": ("doctor", "say what this installation can run on, and why"),
}

USAGE = "usage: pykestrel COMMAND [options] ...\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises for anything a user can do."""
    prepare_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    debug = switched_on(DEBUG.env) or "--debug" in split_words(args)[0]
    terminal = Terminal(debug=debug)
    try:
        try:
            code = _dispatch(args)
        except SystemExit as stop:  # argparse's way to end after --help
            code = stop.code if isinstance(stop.code, int) else 0
        write_stdout()
        return code
    except BrokenPipeError:
        drop_stdout()
        return 0
    except KeyboardInterrupt:
        # An interrupt that struck inside exec() of a text (the import of any dataclass) leaves a
        # mark in the interpreter, which then ends by signal instead of with our code. The next
        # exec() of a text takes the mark away.
        exec("")
        return 130
    except KestrelError as error:
        _report(terminal, as_flags(str(error)))
        return error.exit_code
    except MemoryError as error:
        _report(terminal, f"out of memory ({error or 'an allocation failed'})")
        return 1
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        _report(terminal, name + reason(error))
        return 1
    except Exception as error:
        _report(
            terminal,
            f"{type(error).__name__}: {error} (this is a fault of pykestrel, please report it; "
            "--debug shows where it happened)",
        )
        return 1


def _report(terminal: Terminal, text: str) -> None:
    if terminal.debug:
        terminal.err(traceback.format_exc())
    try:  # what was generated before the failure comes first
        sys.stdout.flush()
    except (OSError, ValueError):
        drop_stdout()
    terminal.error(text)


def _dispatch(args: list[str]) -> int:
    if args[:1] == ["--"]:
        args = args[1:]
    if args[:1] == ["help"]:
        args = [*args[1:2], "--help"]
    if not args or args[0] in ("-h", "--help"):
        write_stdout(help_text())
        return 0
    if args[0] in ("-V", "--version"):
        write_stdout(f"pykestrel {__version__}\n")
        return 0
    if args[0] not in COMMANDS:
        if args[0].startswith("-"):
            raise UsageError(
                f"unknown option {args[0]!r}: options follow a command, as in "
                "`pykestrel run -m MODEL`; see pykestrel --help"
            )
        hint = close_to(args[0], COMMANDS)
        raise UsageError(f"unknown command {args[0]!r}{hint}; see pykestrel --help")

    command = import_module(f".{COMMANDS[args[0]][0]}", __package__)
    parser = Parser(
        prog=f"pykestrel {args[0]}",
        description=command.__doc__,
        epilog="A flag that is not given is taken from its environment variable [env: ...].",
    )
    options = command.configure(parser)
    parser.add_argument(
        "-V", "--version", action="version", version=f"pykestrel {__version__}", help="the version"
    )
    parser.model_words = is_model
    given = parser.parse(args[1:])
    values = Namespace(**{**given, **resolve_all(options, given)})
    values.given = set(given)  # what the command line itself said
    exclude(values, "quiet", ("verbose",), "--quiet and --verbose exclude each other")
    if getattr(values, "threads", None) is not None:
        before_numpy(values.threads)  # no command imports NumPy before it runs
    terminal = Terminal(
        quiet=bool(values.quiet), verbose=bool(values.verbose), debug=bool(values.debug)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_, **__: terminal.warn(str(message))
        code: int = command.run(values, terminal)
    return code


def help_text() -> str:
    """What ``pykestrel --help`` prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name.ljust(width)}{line}" for name, (_, line) in COMMANDS.items()]
    return (
        f"{USAGE}\nRun language models on one NVIDIA GPU, or on the CPU with NumPy alone.\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n"
        "  pykestrel run                          talk to the demo model\n"
        '  pykestrel run -m MODEL "a question"    answer once\n'
        "  pykestrel COMMAND --help               all flags of a command, and their environment\n"
        "                                         variables\n\n"
        "options:\n  -h, --help     this text\n  -V, --version  the version\n"
    )
