"""Whether a model will have room before it is loaded: what `info` and `doctor` say of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .device import Running, choose_device, room
from .errors import NativeError
from .units import show_bytes

if TYPE_CHECKING:
    from .config import ModelConfig


@dataclass(frozen=True)
class Prediction:
    """What loading a model here would come to."""

    engine: str  # "cuda" | "cpu": where it would run
    where: str  # the GPU's name, or "this machine"
    quant: str
    ctx_size: int
    kv: str
    needs: int  # bytes
    free: int
    fits: bool
    resident: bool  # all weights stay where they are fast
    advice: str  # what to change; "" where nothing has to be

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """One line: ``yes: needs 9.1 GB of 140 GB free on NVIDIA H200 ...``."""
        words = "yes" if self.fits else "no"
        words += f": as {self.quant} it needs {show_bytes(self.needs)} of "
        words += f"{show_bytes(self.free)} free on {self.where}"
        return words + (f"; {self.advice}" if self.advice else ", and all of it stays there")


def predict(
    config: ModelConfig, quant: str, ctx_size: int, kv: str, *, fixed_quant: bool = False
) -> Prediction:
    """What ``device="auto"`` would come to: on the first GPU that can be used, else on the CPU."""
    running = choose_device("auto")
    if running.name == "cuda":
        try:
            return _on_gpu(running, config, quant, ctx_size, kv, fixed_quant)
        except NativeError:  # a shape that its kernels cannot run
            pass
    return _on_cpu(config, quant, ctx_size, kv)


def _on_gpu(
    running: Running, config: ModelConfig, quant: str, ctx_size: int, kv: str, fixed_quant: bool
) -> Prediction:
    there = room(running.gpu, config, quant, ctx_size, kv, fixed_quant=fixed_quant)
    advice = ""
    if not there.fits:
        change = " or ".join(there.tips) or "a smaller model"
        on_cpu = _on_cpu(config, quant, ctx_size, kv).fits
        rest = "or all of it runs on the CPU" if on_cpu else "the CPU has no room for it either"
        advice = f"take {change}, {rest}"
    return Prediction(
        engine="cuda" if there.fits else "cpu",
        where=running.why,
        quant=quant,
        ctx_size=ctx_size,
        kv=kv,
        needs=there.need.total,
        free=there.free,
        fits=there.fits,
        resident=there.fits,
        advice=advice,
    )


def _on_cpu(config: ModelConfig, quant: str, ctx_size: int, kv: str) -> Prediction:
    from .engine.cpu.memory import all_expanded, available_memory, memory_needed, tips

    need, free = memory_needed(config, quant, ctx_size, kv), available_memory()
    fits = need["total"] <= free
    resident = fits and all_expanded(need["expanded"], free - need["total"])
    advice = ""
    if not fits:
        advice = f"take {' or '.join(tips(config, quant, ctx_size, kv, free))}"
    elif not resident:
        copies = show_bytes(need["expanded"])
        advice = (
            f"{copies} of float32 copies of the weights would not stay: --cpu-cache keeps as many "
            "as it says, at the cost of that much memory"
        )
    return Prediction(
        engine="cpu",
        where="this machine",
        quant=quant,
        ctx_size=ctx_size,
        kv=kv,
        needs=need["total"],
        free=free,
        fits=fits,
        resident=resident,
        advice=advice,
    )
