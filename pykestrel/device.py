"""Which engine runs a model, and why that one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from .errors import CudaUnavailable


@dataclass(frozen=True)
class Running:
    """What runs a model, and why that."""

    name: str  # "cpu" | "cuda"
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose_device(device: str) -> Running:
    """Which engine a ``device`` argument means here; CudaUnavailable when CUDA cannot be had.

    "auto" falls back to the CPU: silently where there is no GPU to use, with one warning a process
    where the user may expect one to be used (a device is there, or the library is broken).
    """
    global _warned
    if device == "cpu":
        return Running("cpu", "asked for")
    from . import native

    state = native.state()
    missing = "this version has no CUDA engine yet"
    why = f"{missing} ({state.reason})" if state.devices else state.reason
    if device == "cuda":
        raise CudaUnavailable(
            f"CUDA was asked for and cannot be used: {why}; run with device 'cpu', or see "
            "`pykestrel doctor`"
        )
    if (state.devices or state.broken) and not _warned:
        _warned = True
        warnings.warn(f"running on the CPU: {why}", stacklevel=3)
    return Running("cpu", why)


_warned = False
