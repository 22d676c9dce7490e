"""Making the engine of a model of which a GPU holds a part."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from . import native
from .device import Running
from .engine.cpu.linear import Linear, Place
from .engine.cpu.workers import Workers
from .engine.cuda import SmallWeights, decode_config, device_need
from .engine.offload import (
    UPLOAD_THREADS,
    Experts,
    OffloadEngine,
    Residency,
    Stacks,
    Weight,
    choose,
    upload,
    upload_stacks,
    weights_of,
)
from .engines import Request, no_memory, open_cpu, warm
from .errors import NativeError
from .loading import load_vectors
from .meter import Resident
from .native import Handle, abi
from .native.decode import DecodeConfig
from .rope import rope_table

if TYPE_CHECKING:
    from .engine import Engine
    from .engine.cpu import CpuEngine


def open_part(request: Request, running: Running, budget: int) -> tuple[Engine, Running] | None:
    """The CPU's engine with as many weights on the GPU as ``budget`` bytes hold; None when that is
    all of them. Raises NativeError when the library cannot run the model at all."""
    r = request
    whole = device_need(r.config, r.quant, r.ctx_size, r.kv).weights
    if whole <= budget:
        return None
    if r.prefill != "auto":
        warnings.warn(
            f"--prefill {r.prefill} is of a model that is on the GPU as a whole, and --vram-budget "
            f"{budget} holds a part of it: prompts are computed where tokens are; {whole} would "
            "hold all of it",
            stacklevel=5,
        )
    weights = weights_of(r.config, r.quant)
    mode = "projections" if r.verify else r.offload  # every product is compared
    residency = choose(r.config, weights, budget, native.cache_size, mode=mode)
    try:
        engine = _open(r, running.gpu, weights, residency, whole)
    except MemoryError as error:
        raise no_memory(r, error) from None
    why = f"{running.why}: {engine.residency}"
    return engine, Running("offload", why, running.gpu)


def _open(
    request: Request, gpu: int, weights: Sequence[Weight], residency: Residency, whole: int
) -> OffloadEngine:
    """whole: device bytes of all weights."""
    r = request
    cpu = open_cpu(r, r.progress, r.meter, elsewhere=residency.places())
    handle: Handle | None = None
    try:
        handle = native.create(gpu)
        linears = {linear.place: linear for linear in cpu.matrices()}
        with r.meter.wall():
            residency = _upload(handle, residency, linears, cpu)
        segment = _segment(r, handle, residency)
        engine = OffloadEngine(
            cpu,
            handle,
            residency,
            r.quant,
            segment=segment,
            min_flop=r.min_flop,
            verify=r.verify,
            experts=Experts.of(handle, weights, residency, linears, upload),
        )
    except BaseException:
        cpu.close()
        if handle is not None:
            native.destroy(handle)
        raise
    try:
        info, there = native.cache_stats(handle), engine.residency
        r.meter.resident = Resident(
            len(there.places()), there.count, info.bytes, info.evictions, whole
        )
        with r.meter.wall():
            engine.lay_out()
    except BaseException:
        engine.close()
        raise
    return warm(engine)


def _upload(
    handle: Handle,
    residency: Residency,
    linears: Mapping[Place, Linear],
    cpu: CpuEngine,
) -> Residency:
    """What of ``residency`` there was memory for."""
    workers = Workers(min(UPLOAD_THREADS, cpu.threads))
    for i, part in enumerate(residency.parts):
        try:
            if isinstance(part, Stacks):
                upload_stacks(handle, part, linears, cpu.router(part.layer), workers)
            else:
                upload(handle, part, linears[part.place], workers)
        except NativeError as error:
            if error.status < abi.NOT_DONE:
                raise
            for entry in part.entries:
                with suppress(NativeError):  # what there is of it
                    native.cache_drop(handle, entry.key)
            there = residency.first(i)
            warnings.warn(
                f"only {len(there.places())} of the {len(residency.places())} weights that "
                f"--vram-budget allows are on the GPU: {error}",
                stacklevel=6,
            )
            return there
    return residency


def _segment(request: Request, handle: Handle, residency: Residency) -> DecodeConfig | None:
    """The decoder of the layers that run on the device as a whole. K/V and buffers come on top of
    the weights: without room for them these layers are tried product by product, and what lies in
    stacks is computed on the CPU."""
    r, layers = request, residency.segment
    if not layers:
        return None
    small = SmallWeights(*load_vectors(r.source, r.quant))
    rope = rope_table(r.config, r.ctx_size)
    config = decode_config(r.config, small, r.ctx_size, r.kv, rope, r.quant, layers=layers)
    try:
        native.dev_decode_init(handle, config)
    except NativeError as error:
        if error.status < abi.NOT_DONE:
            raise
        words = f"layers {layers.start} to {layers.stop - 1} are tried product by product"
        if residency.stacks:
            words += (
                ", and their experts are computed on the CPU until the router's picks bring them "
                "to the GPU one by one; --offload projections has experts there from the start, "
                f"a smaller --ctx-size than {r.ctx_size} leaves more room for whole layers"
            )
        warnings.warn(f"{words}, which is slower: {error}", stacklevel=6)
        return None
    return config
