"""PYKESTREL_PROF=1: where the time of decoding goes, as a table on stderr when a model is closed.

The library then submits kernel by kernel and times each phase on the device, which is slower than
a run without it; what the phases' shares say stays true.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

from ... import native
from ...environment import switched_on
from ...errors import NativeError
from ...native import Handle, Prof
from ...units import show_bytes

ENV = "PYKESTREL_PROF"
_DEVICE = ("gemm", "reduce", "attention", "norm", "moe")
_HOST = ("cache_probe", "h2d", "d2h_sync", "upload")


def wanted() -> bool:
    """Whether the environment asks for it."""
    return switched_on(ENV)


def render(prof: Prof, title: str) -> str:
    """The counters as text; shares are of a token's time on the same side."""
    tokens = max(1, prof.tokens)
    lines = [
        f"PROF {title}: {prof.tokens} tokens",
        _row("phase", "count", "ms", "us/token", "share"),
    ]
    for side, names in (("device", _DEVICE), ("host", _HOST)):
        whole = sum(getattr(prof, name).ns for name in names if name != "upload")
        for name in names:
            phase = getattr(prof, name)
            share, per_token = "-", "-"  # the weights are uploaded once
            if name != "upload":
                share = f"{100 * phase.ns / whole:.1f} %" if whole else "-"
                per_token = f"{phase.ns / 1e3 / tokens:.2f}"
            lines.append(
                _row(f"{side} {name}", str(phase.count), f"{phase.ns / 1e6:.2f}", per_token, share)
            )
    lines.append(
        f"{prof.launches / tokens:.1f} launches, {prof.h2d_copies / tokens:.2f} copies to the "
        f"device and {prof.d2h_copies / tokens:.2f} from it a token; "
        f"{show_bytes(prof.h2d_bytes)} there, {show_bytes(prof.d2h_bytes)} back; "
        f"{prof.upload_copies} uploads of {show_bytes(prof.upload_bytes)}"
    )
    return "\n".join(lines)


def _row(name: str, *cells: str) -> str:
    return f"  {name:<18}" + "".join(f"{cell:>12}" for cell in cells)


class Profile:
    """Times a handle from now on; `finish` prints ``text()`` once, at the latest at exit."""

    def __init__(self, handle: Handle, title: str, text: Callable[[], str]) -> None:
        native.prof_timing(handle, True)
        self._title = title
        self._text = text
        self._pid = os.getpid()
        self._finish: Callable[[], None] | None = self._print
        atexit.register(self.finish)

    def finish(self) -> None:
        """Print, if that has not been done: before the handle is destroyed."""
        finish, self._finish = self._finish, None
        atexit.unregister(self.finish)
        if finish is not None and self._pid == os.getpid():
            finish()

    def _print(self) -> None:
        try:
            text = self._text()
        except NativeError as error:  # of a lost device
            text = f"PROF {self._title}: the counters cannot be read: {error}"
        print(text, file=sys.stderr)
