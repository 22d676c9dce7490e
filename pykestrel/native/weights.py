"""The device's weight cache: entries of one matrix, or of a stack of them, under a key.

Kinds of matrices are "f32", "bf16", "q8" and "q4"; codes and scales are those of `pykestrel.quant`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..quant import GROUP, n_groups
from . import abi
from .arrays import address
from .handle import Handle
from .loader import load

KINDS: Final = {"f32": abi.F32, "bf16": abi.BF16, "q8": abi.Q8, "q4": abi.Q4}
_NAMES: Final = {number: name for name, number in KINDS.items()}
HEAD_LAYER: Final = abi.HEAD_LAYER


class Proj(IntEnum):
    """What a weight is in its layer; vcuda.h has the shapes."""

    Q = abi.PROJ_Q
    K = abi.PROJ_K
    V = abi.PROJ_V
    O = abi.PROJ_O  # noqa: E741 - the field's name
    GATE = abi.PROJ_GATE
    UP = abi.PROJ_UP
    DOWN = abi.PROJ_DOWN
    FUSED_QKV = abi.PROJ_FUSED_QKV
    FUSED_GU = abi.PROJ_FUSED_GU
    ROUTER = abi.PROJ_ROUTER
    EMBED = abi.PROJ_EMBED
    HEAD = abi.PROJ_HEAD
    EXPERT_GU = abi.PROJ_EXPERT_GU  # plus the expert's number
    EXPERT_DOWN = abi.PROJ_EXPERT_DOWN  # likewise


@dataclass(frozen=True)
class Matrix:
    """``vcuda_matrix``: ``stack`` matrices [n, k]."""

    kind: str  # "f32" | "bf16" | "q8" | "q4": as it lies on the device
    stack: int
    n: int
    k: int

    @property
    def rows(self) -> int:
        return self.stack * self.n


@dataclass(frozen=True)
class CacheInfo:
    """``vcuda_cache_info``. Bytes are those of device memory, padding included."""

    budget: int  # 0: no limit but the device's memory
    bytes: int
    entries: int
    pinned_bytes: int
    hits: int
    misses: int
    uploads: int
    evictions: int


def wkey(layer: int, projection: int) -> int:
    """The key of a weight; `HEAD_LAYER` is the layer of `Proj.EMBED` and `Proj.HEAD`."""
    return int(load().vcuda_wkey(layer, int(projection)))


def cache_size(matrix: Matrix) -> int:
    """Device bytes that a matrix takes, padding included. Touches no device."""
    size = ctypes.c_uint64(0)
    load().vcuda_cache_size(ctypes.byref(_struct(matrix)), ctypes.byref(size))
    return size.value


def cache_budget(handle: Handle, limit: int) -> None:
    """Bytes that the entries may take; what is over it is evicted. 0: no limit."""
    if not 0 <= limit < 1 << 64:
        raise UsageError(f"a cache budget must be a number of bytes, got {limit}")
    load().vcuda_cache_budget(handle.pointer, limit)


def cache_stats(handle: Handle) -> CacheInfo:
    """What the cache holds, and how it was used."""
    raw = abi.CacheInfoStruct(struct_size=ctypes.sizeof(abi.CacheInfoStruct))
    load().vcuda_cache_stats(handle.pointer, ctypes.byref(raw))
    return CacheInfo(**{name: getattr(raw, name) for name in CacheInfo.__dataclass_fields__})


def cache_begin(handle: Handle, key: int, matrix: Matrix, *, pinned: bool = True) -> None:
    """Begin an entry: takes its memory; nobody finds it before `cache_end`."""
    load().vcuda_cache_begin(handle.pointer, key, ctypes.byref(_struct(matrix)), int(pinned))


def cache_rows(
    handle: Handle,
    key: int,
    matrix: Matrix,
    row: int,
    codes: NDArray[Any],
    scales: NDArray[np.float16] | None = None,
    *,
    source: str | None = None,
) -> None:
    """Give rows from ``row`` on of a begun entry, which is ``matrix``.

    source: the kind of ``codes``; None: the entry's own. q8 and q4 come with their scales;
    "bf16" (uint16 bits) and "f32" rows of a quantised entry are quantised on the device.
    """
    source = source or matrix.kind
    rows = len(codes)
    at, scales_at = _addresses(Matrix(source, 1, rows, matrix.k), codes, scales)
    if not 0 <= row <= row + rows <= matrix.rows:
        raise UsageError(f"rows {row} to {row + rows} are outside an entry of {matrix.rows} rows")
    load().vcuda_cache_rows(handle.pointer, key, row, rows, KINDS[source], at, scales_at)


def cache_end(handle: Handle, key: int) -> None:
    """Complete a begun entry. On an error (rows missing, a weight not finite) it is dropped."""
    load().vcuda_cache_end(handle.pointer, key)


def cache_fill(
    handle: Handle, key: int, matrix: Matrix, *, pinned: bool = True, seed: int = 0
) -> None:
    """Make a whole entry of random weights on the device, for measurements."""
    matrix_at = ctypes.byref(_struct(matrix))
    load().vcuda_cache_fill(handle.pointer, key, matrix_at, int(pinned), seed % (1 << 64))


def cache_read(
    handle: Handle, key: int, row: int, rows: int
) -> tuple[NDArray[Any], NDArray[np.float16] | None]:
    """Rows of an entry in its own kind: (codes, scales); no scales of "f32" and "bf16"."""
    matrix = cache_find(handle, key)
    if not 0 <= row <= row + rows <= matrix.rows:
        raise UsageError(f"rows {row} to {row + rows} are outside an entry of {matrix.rows} rows")
    dtype, width, scaled = _layout(matrix.kind, matrix.k)
    codes = np.empty((rows, width), dtype)
    scales = np.empty((rows, n_groups(matrix.k)), np.float16) if scaled else None
    scales_at = None if scales is None else scales.ctypes.data
    load().vcuda_cache_read(handle.pointer, key, row, rows, codes.ctypes.data, scales_at)
    return codes, scales


def cache_find(handle: Handle, key: int) -> Matrix:
    """What an entry is. Raises NativeError when it is not there. Counts a hit or a miss."""
    raw = abi.MatrixStruct(struct_size=ctypes.sizeof(abi.MatrixStruct))
    load().vcuda_cache_find(handle.pointer, key, ctypes.byref(raw))
    return Matrix(_NAMES[raw.kind], raw.stack, raw.n, raw.k)


def cache_pin(handle: Handle, key: int, pinned: bool = True) -> None:
    """A pinned entry is never evicted."""
    load().vcuda_cache_pin(handle.pointer, key, int(pinned))


def cache_drop(handle: Handle, key: int) -> None:
    """Drop an entry, complete or begun."""
    load().vcuda_cache_drop(handle.pointer, key)


def _struct(matrix: Matrix) -> abi.MatrixStruct:
    if matrix.kind not in KINDS:
        raise UsageError(f"a matrix kind is one of {', '.join(KINDS)}, got {matrix.kind!r}")
    return abi.MatrixStruct(
        struct_size=ctypes.sizeof(abi.MatrixStruct),
        kind=KINDS[matrix.kind],
        stack=matrix.stack,
        n=matrix.n,
        k=matrix.k,
    )


def _layout(kind: str, k: int) -> tuple[Any, int, bool]:
    """dtype and items of a row of canonical codes, and whether scales belong to it."""
    if kind == "q8":
        return np.int8, n_groups(k) * GROUP, True
    if kind == "q4":
        return np.uint8, n_groups(k) * GROUP // 2, True
    return (np.uint16 if kind == "bf16" else np.float32), k, False


def _addresses(
    matrix: Matrix, codes: NDArray[Any], scales: NDArray[Any] | None
) -> tuple[int | None, int | None]:
    if matrix.kind not in KINDS:
        raise UsageError(f"a source kind is one of {', '.join(KINDS)}, got {matrix.kind!r}")
    dtype, width, scaled = _layout(matrix.kind, matrix.k)
    if scaled != (scales is not None):
        verb = "need" if scaled else "have no"
        raise UsageError(f"rows of kind {matrix.kind} {verb} scales")
    return (
        address(f"{matrix.kind} rows", codes, dtype, (matrix.n, width)),
        address("scales", scales, np.float16, (matrix.n, n_groups(matrix.k))),
    )
