"""Making the engine of a model: the weights to where it computes, and the way back to the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from .device import Running, fit, on_cpu_instead
from .environment import switched_on
from .errors import LibraryUnavailable, NativeError, OutOfMemory
from .meter import LoadMeter

if TYPE_CHECKING:
    from .config import ModelConfig
    from .engine import Engine
    from .engine.cpu import CpuEngine
    from .engine.cpu.linear import Place
    from .engine.cuda import CudaEngine
    from .engine.offload import OffloadEngine
    from .loading import Source

AnyEngine = TypeVar("AnyEngine", "CpuEngine", "CudaEngine", "OffloadEngine")
Progress: TypeAlias = Callable[[str, int, int], None]  # (tensor name, bytes done, bytes total)

VERIFY = "PYKESTREL_VERIFY"


@dataclass(frozen=True)
class Request:
    """What `load` was asked for, checked."""

    source: Source
    config: ModelConfig
    quant: str  # of the weights: "bf16" | "q8" | "q4"
    fixed_quant: bool  # a quantised directory: it holds this kind and no other
    ctx_size: int
    kv: str
    device: str  # "auto" | "cuda" | "cpu"
    prefill: str  # "auto" | "cpu" | "cuda"
    verify: bool
    cpu_cache: int | None
    threads: int | None
    progress: Progress | None
    meter: LoadMeter
    vram_budget: int | None = None  # bytes of weights on the GPU; None: no limit
    host_budget: int | None = None  # bytes of weights in memory; None: all
    min_flop: float | None = None  # of a product that is tried on the GPU; None: measured
    offload: str = "segments"  # how a part of the weights is used: OFFLOADS of arguments.py


def verify_wanted(given: bool | None) -> bool:
    """``given``, else what PYKESTREL_VERIFY says."""
    if given is not None:
        return bool(given)
    return switched_on(VERIFY)


def open_engine(request: Request, running: Running) -> tuple[Engine, Running]:
    """The engine that runs the model, and why that one.

    Where the GPU of ``running`` cannot, the CPU does; with device "cuda" that is CudaUnavailable.
    """
    r = request
    if running.name == "cuda" and r.vram_budget is not None:
        from .offloading import open_part

        try:
            part = open_part(r, running, r.vram_budget)
        except (NativeError, LibraryUnavailable) as error:
            running = on_cpu_instead(r.device, str(error))
            r.meter.reset()
        else:
            if part is not None:
                return part
    running = fit(
        running, r.device, r.config, r.quant, r.ctx_size, r.kv, fixed_quant=r.fixed_quant
    )  # fmt: skip
    if running.name == "cuda":
        try:
            engine = _open_cuda(request, running)
        except (NativeError, LibraryUnavailable) as error:
            running = on_cpu_instead(r.device, str(error))
            r.meter.reset()
        else:
            if r.vram_budget is None:
                _say_unused(r, "without --vram-budget the GPU holds all of the model")
            return engine, running
    _say_unused(r, f"the model runs on the CPU ({running.why})")
    if r.verify:
        warnings.warn("there is nothing to verify: the model runs on the CPU alone", stacklevel=3)
    return open_cpu(request, r.progress, r.meter), running


def _say_unused(request: Request, why: str) -> None:
    """Settings for a model of which a GPU holds a part, where none does."""
    r = request
    given = {
        "--vram-budget": r.vram_budget is not None,
        "--offload": r.offload != "segments",
        "--min-flop": r.min_flop is not None,
    }
    flags = [flag for flag, is_given in given.items() if is_given]
    if flags:
        have = "has" if len(flags) == 1 else "have"
        warnings.warn(f"{' and '.join(flags)} {have} no effect: {why}", stacklevel=4)


def open_cpu(
    request: Request,
    progress: Progress | None = None,
    meter: LoadMeter | None = None,
    elsewhere: Container[Place] | None = None,
) -> CpuEngine:
    """The CPU's engine. elsewhere: matrices that a device computes as a rule; the engine is not
    warmed up then, as there is more to be known before."""
    from .engine.cpu import CpuEngine, Store, check_memory, memory_needed
    from .loading import load_as_needed, load_weights

    r = request
    meter = meter or LoadMeter()
    load = load_weights if r.host_budget is None else load_as_needed
    check_memory(r.config, r.quant, r.ctx_size, r.kv, r.host_budget)
    try:
        with meter.wall():
            weights = load(r.source, r.quant, progress, meter)
            wanted = memory_needed(r.config, r.quant, r.ctx_size, r.kv)["matrices"]
            store = Store(r.host_budget, wanted=wanted)
            engine = CpuEngine(
                weights,
                ctx_size=r.ctx_size,
                kv=r.kv,
                cpu_cache=r.cpu_cache,
                threads=r.threads,
                elsewhere=elsewhere or (),
                store=store,
            )
        return warm(engine) if elsewhere is None else engine
    except MemoryError as error:
        raise no_memory(r, error) from None


def no_memory(request: Request, error: MemoryError) -> OutOfMemory:
    """What is said when an allocation fails while an engine is made."""
    return OutOfMemory(
        f"{request.source.name} does not fit in memory ({error or 'an allocation failed'}); try "
        f"quant='q4', a smaller ctx_size than {request.ctx_size}, or a smaller cpu_cache"
    )


def _open_cuda(request: Request, running: Running) -> CudaEngine:
    from . import native
    from .engine.cuda import CudaEngine
    from .loading.on_device import load_on_device

    r = request
    handle = native.create(running.gpu)
    try:
        small = load_on_device(r.source, r.config, r.quant, handle, r.progress, r.meter)
        engine = CudaEngine(
            handle,
            r.config,
            small,
            quant=r.quant,
            ctx_size=r.ctx_size,
            kv=r.kv,
            make_cpu=lambda: open_cpu(request),
            prefill=r.prefill,
            verify=r.verify,
        )
    except BaseException:
        native.destroy(handle)
        raise
    return warm(engine)


def warm(engine: AnyEngine) -> AnyEngine:
    """Nothing is left to be built by the first token; what fails or is interrupted is closed."""
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    return engine


def open_synthetic(
    config: ModelConfig,
    quant: str,
    ctx_size: int,
    kv: str,
    running: Running,
    meter: LoadMeter | None = None,
) -> CudaEngine:
    """An engine of random weights, made on the device: for measuring speed. It has no way back to
    the CPU. Raises CudaUnavailable when the GPU has no room for it."""
    from . import native
    from .engine.cuda import CudaEngine, SmallWeights, entries
    from .loading.on_device import resident

    fit(running, "cuda", config, quant, ctx_size, kv, parts=False)
    handle = native.create(running.gpu)
    try:
        wanted = entries(config, quant)
        meter = meter or LoadMeter()
        meter.wanted, meter.threads = len(wanted), 1
        with meter.wall():
            for seed, entry in enumerate(wanted):
                native.cache_fill(handle, entry.key, entry.matrix, seed=seed)
                meter.weights += 1
        meter.upload_s = native.prof_read(handle).upload.ns / 1e9
        meter.resident = resident(handle, config, quant)
        small = SmallWeights.plain(config)
        engine = CudaEngine(handle, config, small, quant=quant, ctx_size=ctx_size, kv=kv)
        engine.warm_up()
        return engine
    except BaseException:
        native.destroy(handle)
        raise
