"""A program on a pseudo-terminal: type, wait for text, look at what the screen was sent."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

# Takes the terminal as the controlling one, so that Ctrl+C typed into it becomes SIGINT. A small
# program instead of preexec_fn: forking a process that has threads may hang.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>()][0-9A-B]?|\x1b\][^\x07]*\x07|\x1b\[?[0-9;?]*$"
)


class PtySession:
    """A running program. Every wait has a limit; past it the wait fails with the screen's text."""

    def __init__(self, command: list[str], *, env: dict[str, str], cwd: Path) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)
        self.raw = ""  # everything the program wrote
        self._at = 0  # up to where `expect` has looked

    @property
    def text(self) -> str:
        """Everything written so far, without escape sequences and carriage returns."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def expect(self, pattern: str, timeout: float = 60) -> str:
        """Wait for a regular expression after the last match; returns what was matched."""
        end = time.monotonic() + timeout
        while True:
            found = re.compile(pattern, re.DOTALL).search(self.text, self._at)
            if found is not None:
                self._at = found.end()
                return found[0]
            if time.monotonic() > end or not self._read(end):
                raise AssertionError(
                    f"{pattern!r} did not come within {timeout} s; after the last match there "
                    f"was:\n{self.text[self._at :]!r}"
                )

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def line(self, text: str) -> None:
        """Type a line and Enter."""
        self.type(text + "\r")

    def wait(self, timeout: float = 60) -> int:
        """Wait for the end of the program; its exit code."""
        end = time.monotonic() + timeout
        while self._read(end):
            pass
        return self._process.wait(max(0.1, end - time.monotonic()))

    def _read(self, end: float) -> bool:
        """Take in what there is; False at the end of the program or of the time."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
        os.close(self._master)
