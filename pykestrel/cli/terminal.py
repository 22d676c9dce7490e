"""The two output streams: stdout for generated text, stderr for everything else.

Nothing here raises for a character that the terminal cannot show, for a closed stdout or for a
dumb terminal; colour and moving progress bars appear only where they make sense.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from ..errors import KestrelError
from ..files import reason
from ..units import show_bytes

Progress = Callable[[str, int, int], None]  # (what, done, total)


def prepare_streams() -> None:
    """Make stdout and stderr writable whatever the caller left of them (``>&-``, LC_ALL=C)."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=errors)


def drop_stdout() -> None:
    """After a broken pipe: let the interpreter's last flush go nowhere instead of complaining."""
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
    except (OSError, ValueError):
        pass


def write_stdout(text: str = "") -> None:
    """Write text to stdout and flush it. BrokenPipeError is left to the caller of the command."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise KestrelError(f"cannot write to stdout: {reason(error)}") from None


def _fancy(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether escape sequences are welcome: a terminal that moves its cursor."""
    return stream.isatty() and environ.get("TERM", "") not in ("", "dumb", "unknown")


class Terminal:
    """What a command writes to. ``out`` is for results, the rest goes to stderr."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, debug: bool = False) -> None:
        env = os.environ
        self.quiet, self.verbose, self.debug = quiet, verbose, debug
        colour = not env.get("NO_COLOR")
        self.fancy_err = _fancy(sys.stderr, env)
        self.colour_err = colour and self.fancy_err
        self.colour_out = colour and _fancy(sys.stdout, env)
        self.interactive = sys.stdin is not None and sys.stdin.isatty()

    # -- stdout --------------------------------------------------------------------------------

    def out(self, text: str) -> None:
        """Write text to stdout now. Lone surrogates and unknown characters become marks."""
        if text:
            write_stdout(text)

    def line(self, text: str = "") -> None:
        self.out(text + "\n")

    def json(self, value: Any) -> None:
        """One JSON object on a line; in ASCII where stdout could not show all of it."""
        encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
        unicode = encoding.replace("-", "") in ("utf8", "utf16", "utf32")
        self.line(json.dumps(value, ensure_ascii=not unicode))

    # -- stderr --------------------------------------------------------------------------------

    def err(self, text: str) -> None:
        """Write to stderr. A closed stderr is nobody's problem."""
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            pass

    def note(self, text: str) -> None:
        """Something the user may like to know; not with --quiet."""
        if not self.quiet:
            self.err(self._paint(text, "2") + "\n")

    def detail(self, text: str) -> None:
        """Only with --verbose."""
        if self.verbose:
            self.err(self._paint(text, "2") + "\n")

    def warn(self, text: str) -> None:
        if not self.quiet:
            self.err(f"pykestrel: {self._paint('warning', '33')}: {text}\n")

    def error(self, text: str) -> None:
        one_line = " ".join(str(text).split())
        self.err(f"pykestrel: {self._paint('error', '31')}: {one_line}\n")

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour_err else text

    # -- questions and progress ----------------------------------------------------------------

    def ask(self, question: str) -> bool:
        """A yes/no question on the terminal; the empty answer is yes, end of input is no."""
        while True:
            try:
                self.err(f"{question} [Y/n] ")
                answer = sys.stdin.readline()
            except KeyboardInterrupt:
                self.err("\n")  # after the ^C that the terminal shows
                raise
            if answer == "":
                self.err("\n")
                return False
            word = answer.strip().lower()
            if word in ("", "y", "yes"):
                return True
            if word in ("n", "no"):
                return False

    @contextmanager
    def progress(
        self, title: str, *, unit: str = "bytes", beside: Callable[[], str] | None = None
    ) -> Iterator[Progress]:
        """A bar on stderr while the body runs: silent with --quiet, and off a terminal a plain
        line at most every 10 seconds. ``beside``: what stands beside the amount, with the seconds
        that have passed instead of those that are left."""
        if self.quiet:
            yield lambda what, done, total: None
        elif self.fancy_err:
            with self._bar(title, unit, beside) as report:
                yield report
        else:
            yield self._plain_progress(title, unit, beside)

    def _plain_progress(self, title: str, unit: str, beside: Callable[[], str] | None) -> Progress:
        last = time.monotonic()

        def report(what: str, done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= 10 and total > 0:
                last = time.monotonic()
                amount = f"{done} of {total} {unit}"
                if unit == "bytes":
                    amount = f"{show_bytes(done)} of {show_bytes(total)}"
                if beside is not None:
                    amount += f", {beside()}"
                self.err(f"{title}: {amount}, {100 * done // total} %\n")

        return report

    @contextmanager
    def _bar(self, title: str, unit: str, beside: Callable[[], str] | None) -> Iterator[Progress]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        console = Console(stderr=True, no_color=not self.colour_err, highlight=False)
        times: list[ProgressColumn] = [TimeRemainingColumn()]
        if beside is not None:
            times = [TextColumn("{task.fields[beside]}"), TextColumn("{task.elapsed:.1f} s")]
        columns = (TextColumn("{task.description}"), BarColumn(), amount, *times)
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=None, visible=False, beside="")

            def report(what: str, done: int, total: int) -> None:
                if total > 0:  # before that there is nothing to show but a question mark
                    more = "" if beside is None else beside()
                    bar.update(task, completed=done, total=total, visible=True, beside=more)

            yield report


# -- stdin ----------------------------------------------------------------------------------------


def stdin_is_piped() -> bool:
    """Whether stdin is a pipe, a file or a socket: not a terminal, /dev/null or closed."""
    if sys.stdin is None:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # no descriptor behind it
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_stdin(terminal: Terminal | None = None, what: str = "text") -> str:
    """All of stdin as text; raises KestrelError when it is not UTF-8.

    A pipe that stays silent looks like a program that hangs: after 2 s ``terminal`` says what is
    waited for.
    """
    note = terminal.note if terminal is not None else lambda text: None
    timer = threading.Timer(2, note, [f"waiting for the {what} on stdin (Ctrl+D ends it)"])
    timer.daemon = True
    timer.start()
    try:
        first = sys.stdin.buffer.read(1)
    finally:
        timer.cancel()
    return decode(first + sys.stdin.buffer.read(), "stdin")


def decode(data: bytes, what: str) -> str:
    """UTF-8 text without a byte order mark, line ends as they are."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KestrelError(
            f"{what} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert it to UTF-8 first"
        ) from None


def read_text_file(path: str, terminal: Terminal | None = None) -> str:
    """A UTF-8 text file; ``-`` is stdin. Raises KestrelError that names the file."""
    if path == "-":
        return read_stdin(terminal)
    try:
        with open(path, "rb") as file:
            return decode(file.read(), path)
    except OSError as error:
        raise KestrelError(f"{path} cannot be read: {reason(error)}") from None


# -- tables ---------------------------------------------------------------------------------------


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A Markdown table; the first row is the head, columns in ``right`` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def show(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        )
        return "| " + " | ".join(cells) + " |"

    rule = "|".join(
        "-" * (width + 1) + ":" if i in right else "-" * (width + 2)
        for i, width in enumerate(widths)
    )
    return "\n".join([show(rows[0]), f"|{rule}|", *map(show, rows[1:])])
