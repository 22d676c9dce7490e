"""Tensors in files: where each lies, and its rows as bf16 bits or float32.

Both file formats end up here. A `TensorInfo` is trusted: its reader has checked that the shape,
the dtype and the bytes in the file agree, so reading rows can only fail with the disk.
Rows are those of the 2-D view ``[prod(shape[:-1]), shape[-1]]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..files import reason
from ..quant import f16_to_f32, f32_to_bf16

F32: TypeAlias = NDArray[np.float32]
Bits: TypeAlias = NDArray[np.uint16]
# Raw rows [n, bytes a row] of a block format to float32 [n, K].
Decoder: TypeAlias = Callable[[NDArray[np.uint8]], NDArray[np.float32]]

PLAIN = ("F32", "F16", "BF16")  # what weights of other tools may be
ITEM: dict[str, Any] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),  # I8 and U8: only in our own quantised files
    "U8": np.dtype("u1"),
}

NON_FINITE = "a NaN or infinite weight"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. ``shape`` is as in PyTorch: the last dimension is contiguous."""

    name: str
    dtype: str  # BF16 | F16 | F32 | I8 | U8 | ... or the GGUF type: Q4_K ...
    shape: tuple[int, ...]
    path: Path
    offset: int  # bytes from the start of the file
    nbytes: int
    decode: Decoder | None = field(default=None, compare=False, repr=False)  # block formats

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


TensorTable: TypeAlias = "dict[str, TensorInfo]"


def read_raw(info: TensorInfo, lo: int, hi: int) -> NDArray[np.uint8]:
    """The bytes ``[hi - lo, bytes a row]`` of rows lo to hi.

    Read, not mapped: a file that shrinks under a mapping kills the process.
    """
    width = info.nbytes // info.rows if info.rows else 0
    out = np.empty((hi - lo, width), np.uint8)
    try:
        with open(info.path, "rb", buffering=0) as file:
            file.seek(info.offset + lo * width)
            view, done = out.reshape(-1).data, 0
            while done < len(view):
                n = file.readinto(view[done:])
                if not n:
                    raise ModelError(f"{info.path} became shorter while it was read")
                done += n
    except OSError as error:
        raise ModelError(f"{info.path} cannot be read: {reason(error)}") from None
    return out


def read_plain(info: TensorInfo, lo: int, hi: int) -> NDArray[Any]:
    """Rows lo to hi in the dtype of the file, ``[hi - lo, K]``."""
    raw = read_raw(info, lo, hi)
    dtype: np.dtype[Any] = ITEM[info.dtype]
    values: NDArray[Any] = raw.view(dtype).astype(dtype.newbyteorder("="), copy=False)
    return values


def read_f32(info: TensorInfo, lo: int, hi: int) -> F32:
    """Rows lo to hi as float32 ``[hi - lo, K]``; exact, all values finite."""
    if info.decode is not None:
        values = info.decode(read_raw(info, lo, hi))
    else:
        plain = read_plain(info, lo, hi)
        if info.dtype == "BF16":
            return _widen(_finite_bits(plain, info))
        values = plain if info.dtype == "F32" else f16_to_f32(plain)
    # the largest magnitude is NaN or inf if any is: one pass, no temporary of booleans
    if values.size and not (np.isfinite(values.max()) and np.isfinite(values.min())):
        raise non_finite(info)
    return values


def read_bf16(info: TensorInfo, lo: int, hi: int) -> Bits:
    """Rows lo to hi as bf16 bits ``[hi - lo, K]``, rounded to nearest even; all finite."""
    if info.dtype == "BF16" and info.decode is None:
        return _finite_bits(read_plain(info, lo, hi), info)
    bits = f32_to_bf16(read_f32(info, lo, hi))
    if not _all_finite(bits):
        raise ModelError(
            f"{info.path}: {info.name} has a weight too large for bf16; load it with q8 or q4"
        )
    return bits


def non_finite(info: TensorInfo) -> ModelError:
    return ModelError(
        f"{info.path}: {info.name} holds {NON_FINITE}; the file is damaged, or the model was saved "
        "broken: download it again"
    )


def _finite_bits(bits: Bits, info: TensorInfo) -> Bits:
    if not _all_finite(bits):
        raise non_finite(info)
    return bits


def _all_finite(bits: Bits) -> bool:
    # without the sign, what is not finite is 0x7F80 (infinity) or more
    return not bits.size or int((bits & 0x7FFF).max()) < 0x7F80


def _widen(bits: Bits) -> F32:
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors hold the same bytes in the same form."""
    if (a.dtype, a.shape, a.nbytes) != (b.dtype, b.shape, b.nbytes):
        return False
    if (a.path, a.offset) == (b.path, b.offset):
        return True
    for lo, hi in tiles(a.rows, max(1, a.nbytes // max(1, a.rows)), 8 << 20):
        if not np.array_equal(read_raw(a, lo, hi), read_raw(b, lo, hi)):
            return False
    return True


def tiles(rows: int, row_bytes: int, budget: int) -> Iterable[tuple[int, int]]:
    """Ranges of rows of at most ``budget`` bytes each (one row at least)."""
    step = max(1, budget // max(1, row_bytes))
    for lo in range(0, rows, step):
        yield lo, min(rows, lo + step)
