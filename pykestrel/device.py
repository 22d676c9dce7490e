"""Which engine runs a model, and why that one."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import CudaUnavailable, NativeError

if TYPE_CHECKING:
    from .config import ModelConfig
    from .engine.cuda import Need


@dataclass(frozen=True)
class Running:
    """What runs a model, and why that."""

    name: str  # "cpu" | "cuda" | "offload"
    why: str
    gpu: int = 0  # CUDA's number of the device

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose_device(device: str) -> Running:
    """Which engine a ``device`` argument means here; CudaUnavailable when CUDA cannot be had.

    "auto" falls back to the CPU: silently where there is no GPU to use, with one warning a process
    where the user may expect one to be used (a device or a driver is there, or the library is
    broken).
    """
    global _warned
    if device == "cpu":
        return Running("cpu", "asked for")
    from . import native

    state = native.state()
    why = state.reason
    for index in range(state.devices):
        try:
            info = native.dev_query(index)
        except NativeError as error:
            why = str(error)
            continue
        if info.kernel_arch:
            return Running("cuda", info.name, index)
        why = (
            f"this library has no code for compute capability {info.cc_major}.{info.cc_minor} "
            f"({info.name}); build it with CUDAARCHS={info.cc_major}{info.cc_minor}"
        )
    if device == "cuda":
        raise refusal(why)
    if not _warned and (state.devices or state.broken or (state.library and _has_driver())):
        _warned = True
        warnings.warn(f"running on the CPU: {why}", stacklevel=3)
    return Running("cpu", why)


def _has_driver() -> bool:
    """Whether a driver is there whose devices nobody hides: one that fails, or is too old."""
    from . import native

    try:
        return native.driver_version()[0] > 0 and "CUDA_VISIBLE_DEVICES" not in os.environ
    except NativeError:
        return True


def refusal(why: str) -> CudaUnavailable:
    """What "cuda" is answered when it cannot be had."""
    return CudaUnavailable(
        f"CUDA was asked for and cannot be used: {why}; run with device 'cpu', or see "
        "`pykestrel doctor`",
        why,
    )


def on_cpu_instead(device: str, why: str) -> Running:
    """The CPU in the place of a GPU that cannot run this model: an error where CUDA was asked for,
    else a warning."""
    if device == "cuda":
        raise refusal(why)
    warnings.warn(f"running on the CPU: {why}", stacklevel=4)
    return Running("cpu", why)


def fit(
    running: Running, device: str, config: ModelConfig, quant: str, ctx_size: int, kv: str,
    *, fixed_quant: bool = False, parts: bool = True,
) -> Running:  # fmt: skip
    """``running`` when its GPU can run this model and has the memory, else the CPU, or
    CudaUnavailable with what is needed, what is free and what would fit.

    fixed_quant: another kind of weights is no choice (a quantised directory). parts: a part of them
    on the GPU is one.
    """
    if running.name != "cuda":
        return running
    from .engine.cpu.memory import gigabytes

    try:
        there = room(running.gpu, config, quant, ctx_size, kv, fixed_quant=fixed_quant, parts=parts)
    except NativeError as error:
        return on_cpu_instead(device, str(error))
    if there.fits:
        return running
    need = there.need
    why = (
        f"this model needs {gigabytes(need.total)} on {running.why} (weights as {quant} "
        f"{gigabytes(need.weights)}, K/V of {ctx_size} positions as {kv} and buffers "
        f"{gigabytes(need.decode)}, CUDA itself {gigabytes(need.margin)}), free "
        f"{gigabytes(there.free)}; try "
        f"{' or '.join(there.tips) or 'a smaller model'}"
    )
    return on_cpu_instead(device, why)


@dataclass(frozen=True)
class Room:
    """What a model needs on a GPU, what is free there, and what would make it fit."""

    need: Need
    free: int
    tips: tuple[str, ...] = ()  # flags, each with what is needed then; empty where it fits

    @property
    def fits(self) -> bool:
        return self.need.total <= self.free


def room(
    gpu: int, config: ModelConfig, quant: str, ctx_size: int, kv: str,
    *, fixed_quant: bool = False, parts: bool = True,
) -> Room:  # fmt: skip
    """Whether a model has room on a GPU. Raises NativeError when the library cannot run it."""
    from . import native
    from .engine.cpu.memory import gigabytes
    from .engine.cuda import device_need

    need = device_need(config, quant, ctx_size, kv)
    free = native.dev_query(gpu).memory_free
    if need.total <= free:
        return Room(need, free)
    tips = []
    for smaller in () if fixed_quant else {"bf16": ("q8", "q4"), "q8": ("q4",)}.get(quant, ()):
        total = device_need(config, smaller, ctx_size, kv).total
        if total <= free:
            tips.append(f"--quant {smaller} ({gigabytes(total)})")
    shorter = ctx_size // 2
    while shorter >= 256 and device_need(config, quant, shorter, kv).total > free:
        shorter //= 2
    if shorter >= 256:
        total = device_need(config, quant, shorter, kv).total
        tips.append(f"--ctx-size {shorter} ({gigabytes(total)})")
    beside = device_need(config, quant, ctx_size, kv, segment=True)
    part = (free - beside.decode - beside.margin) // 10**8  # of the weights, in 100 MB
    if parts and part > 0:
        tips.append(f"--vram-budget {part / 10:.1f}GB (a part on the GPU, the rest on the CPU)")
    return Room(need, free, tuple(tips))


_warned = False
