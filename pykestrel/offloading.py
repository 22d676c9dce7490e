"""Making the engine of a model of which a GPU holds a part."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from . import native
from .device import Running
from .engine.cpu.linear import Linear, Place
from .engine.cuda import SmallWeights, decode_config, device_need
from .engine.offload import Experts, OffloadEngine, Residency, Weight, choose, upload, weights_of
from .engines import Request, open_cpu, warm
from .errors import NativeError
from .loading import load_vectors
from .meter import Resident
from .native import Handle, abi
from .native.decode import DecodeConfig
from .rope import rope_table

if TYPE_CHECKING:
    from .engine import Engine


def open_part(request: Request, running: Running, budget: int) -> tuple[Engine, Running] | None:
    """The CPU's engine with as many weights on the GPU as ``budget`` bytes hold; None when that is
    all of them. Raises NativeError when the library cannot run the model at all."""
    r = request
    whole = device_need(r.config, r.quant, r.ctx_size, r.kv).weights
    if whole <= budget:
        return None
    weights = weights_of(r.config, r.quant)
    residency = choose(r.config, weights, budget, native.cache_size, mode=r.offload)
    engine = _open(r, running.gpu, weights, residency, whole)
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
            residency = _upload(handle, residency, linears)
        segment = None if r.verify else _segment(r, handle, residency)
        info = native.cache_stats(handle)
        r.meter.resident = Resident(
            len(residency.weights), residency.count, info.bytes, info.evictions, whole
        )
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
        return warm(engine)
    except BaseException:
        cpu.close()
        if handle is not None:
            native.destroy(handle)
        raise


def _upload(handle: Handle, residency: Residency, linears: Mapping[Place, Linear]) -> Residency:
    """What of ``residency`` there was memory for."""
    for i, weight in enumerate(residency.weights):
        try:
            upload(handle, weight, linears[weight.place])
        except NativeError as error:
            if error.status < abi.NOT_DONE:
                raise
            with suppress(NativeError):  # what there is of it
                native.cache_drop(handle, weight.key)
            warnings.warn(
                f"only {i} of the {len(residency.weights)} weights that --vram-budget allows are "
                f"on the GPU: {error}",
                stacklevel=6,
            )
            return residency.first(i)
    return residency


def _segment(request: Request, handle: Handle, residency: Residency) -> DecodeConfig | None:
    """The decoder of the layers that run on the device as a whole. K/V and buffers come on top of
    the weights: without room for them these layers are tried product by product."""
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
        warnings.warn(
            f"layers {layers.start} to {layers.stop - 1} are tried product by product, which is "
            f"slower: {error}",
            stacklevel=6,
        )
        return None
    return config
