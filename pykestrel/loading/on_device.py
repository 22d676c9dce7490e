"""Files to the weight cache of a GPU, block by block: the host never holds the model.

What is stored as bf16 is quantised on the device, which gives the bytes that `pykestrel.quant`
gives; all other files are decoded to float32 here first. A few threads fetch and decode pieces of
the mapped files, and the library copies and converts behind them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias

from .. import native
from ..config import ModelConfig
from ..engine.cuda import SmallWeights, entries, place
from ..errors import NativeError
from ..meter import LoadMeter, Resident, uploading
from ..native import Handle, abi
from ..quant import QTensor
from ..weights import F32
from .families import Plan, Target, make_plan
from .load import (
    TILE,
    Progress,
    Report,
    blocks,
    in_bf16,
    quantized_blocks,
    read_tensors,
    read_vector,
    run_jobs,
)
from .quantized import check_values, quantized_plan, stored_quant
from .source import Source
from .tensors import TensorInfo, can_map, map_raw, read_bf16, read_f32, read_plain, tiles

# (first row, codes, scales or None, kind of the codes) of one matrix or stack
Rows: TypeAlias = Iterator[tuple[int, Any, Any, str]]
Read: TypeAlias = Callable[[Target, Report], Rows]

_WORKERS: Final = 8  # more than the copies need: they also decode, and wait for disks
# Bytes of a mapped file in one call: a little less than a staging buffer of the library (16 MiB),
# which so is always filled by one call. What has to be read or decoded first comes in smaller
# tiles, which are still in the processor's cache when they are copied on.
_PIECE: Final = (16 << 20) - (64 << 10)

_mapped_plain = partial(read_plain, raw=map_raw)
_mapped_bf16 = partial(read_bf16, raw=map_raw)
_mapped_f32 = partial(read_f32, raw=map_raw)


def load_on_device(
    source: Source,
    config: ModelConfig,
    quant: str,
    handle: Handle,
    progress: Progress | None = None,
    meter: LoadMeter | None = None,
) -> SmallWeights:
    """Put every matrix into the cache of ``handle``, pinned; norms and biases are returned.

    ``quant`` must be what a quantised directory holds; ``meter`` counts. Raises ModelError for
    whatever is wrong with the files, NativeError when the device has no room.
    """
    meter = meter or LoadMeter()
    with meter.wall():
        plan, read, total = _plan(source, config, quant)
        small = _upload(config, quant, plan, read, total, handle, progress, meter)
    meter.resident = resident(handle, config, quant)
    return small


def resident(handle: Handle, config: ModelConfig, quant: str) -> Resident:
    """What the device's cache holds now, against what the model wants there."""
    info = native.cache_stats(handle)
    return Resident(info.entries, len(entries(config, quant)), info.bytes, info.evictions)


def _plan(source: Source, config: ModelConfig, quant: str) -> tuple[Plan, Read, int]:
    """What to load, how to read a matrix of it, and the bytes of all."""
    table = read_tensors(source)
    stored = stored_quant(source)
    if stored is None:
        plan = make_plan(config, table, source.path, gguf=source.kind == "gguf")
        return plan, lambda target, report: _original_rows(target, quant, report), plan.nbytes
    plan, pairs = quantized_plan(config, table, source.path, stored.kind)

    def read(target: Target, report: Report) -> Rows:
        codes, scales = pairs[target.name]
        return _stored_rows(codes, scales, stored.kind, target.shape[-1], report)

    return plan, read, sum(info.nbytes for info in table.values())


def _original_rows(target: Target, quant: str, report: Report) -> Rows:
    if in_bf16(target):
        # the quantiser finds a NaN itself
        reader = _mapped_bf16 if quant == "bf16" else _mapped_plain
        for lo, bits in blocks(target, reader, report, 2 * _PIECE if can_map() else TILE):
            yield lo, bits, None, "bf16"
    elif quant == "bf16":
        for lo, bits in blocks(target, read_bf16, report):
            yield lo, bits, None, "bf16"
    else:
        for lo, values in blocks(target, _mapped_f32, report):
            yield lo, values, None, "f32"


def _stored_rows(codes: TensorInfo, scales: TensorInfo, kind: str, k: int, report: Report) -> Rows:
    row_bytes = (codes.nbytes + scales.nbytes) // max(1, codes.rows)
    for lo, hi in tiles(codes.rows, row_bytes, _PIECE if can_map() else TILE):
        rows = (_mapped_plain(info, lo, hi) for info in (codes, scales))
        part = QTensor(kind, (hi - lo, k), *rows)
        check_values(part, codes)
        report((hi - lo) * row_bytes)
        yield lo, part.codes, part.scales, kind


def _upload(
    config: ModelConfig,
    quant: str,
    plan: Plan,
    read: Read,
    total: int,
    handle: Handle,
    progress: Progress | None,
    meter: LoadMeter,
) -> SmallWeights:
    by_place = {(entry.layer, entry.proj): entry for entry in entries(config, quant)}
    began, uploaded = time.perf_counter(), native.prof_read(handle).upload.ns
    for entry in by_place.values():  # all memory first: a model that does not fit fails at once
        native.cache_begin(handle, entry.key, entry.matrix)
    meter.reserve_s = time.perf_counter() - began
    parts: dict[Any, list[Target]] = defaultdict(list)  # of an entry
    for target in plan.targets:
        if _is_on_device(target):
            parts[place(config, target.layer, target.field)[:2]].append(target)

    def work(target: Target, report: Report) -> F32 | None:
        if not _is_on_device(target):
            return read_vector(target, report)
        layer, proj, first = place(config, target.layer, target.field)
        entry = by_place[layer, proj]
        key, matrix = entry.key, entry.matrix
        if target.is_matrix:
            for lo, codes, scales, kind in read(target, report):
                with uploading():
                    native.cache_rows(handle, key, matrix, first + lo, codes, scales, source=kind)
        else:
            rows = read_vector(target, report)
            with uploading():
                native.cache_rows(handle, key, matrix, first, rows)
        return None

    values = run_jobs(plan.targets, work, total, progress, 0, meter, _WORKERS)
    meter.in_uploads((native.prof_read(handle).upload.ns - uploaded) / 1e9)
    given = time.perf_counter()
    # Each of these waits for everything that is on its way, so none of them in between.
    for where, entry in by_place.items():
        _end(handle, entry.key, parts[where], quant, read)
    meter.finish_s = time.perf_counter() - given
    layers: list[dict[str, F32]] = [{} for _ in range(config.num_hidden_layers)]
    top: dict[str, F32] = {}
    for target, value in zip(plan.targets, values, strict=True):
        if value is not None:
            (top if target.layer is None else layers[target.layer])[target.field] = value
    return SmallWeights(top["final_norm"], layers)


def _is_on_device(target: Target) -> bool:
    return target.is_matrix or target.field == "router"


def _end(handle: Handle, key: int, targets: list[Target], quant: str, read: Read) -> None:
    """Complete an entry. A weight that its kind cannot hold is a fault of the files, which reading
    them again finds and names; every other failure is the device's."""
    try:
        native.cache_end(handle, key)
    except NativeError as error:
        if error.status == abi.NOT_DONE:
            for target in targets:
                if target.is_matrix:
                    _check(target, quant, read)
        raise


def _check(target: Target, quant: str, read: Read) -> None:
    """Raise ModelError when the quantiser refuses a weight."""

    def report(nbytes: int) -> None:
        """They have been counted."""

    _, _, _, kind = next(read(target, report))
    if kind != quant:  # else it went to the device as it is
        for _ in quantized_blocks(target, quant, report):
            pass
