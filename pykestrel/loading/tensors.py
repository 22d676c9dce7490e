"""Tensors in files: where each lies, and its rows as bf16 bits or float32.

Both file formats end up here. A `TensorInfo` is trusted: its reader has checked that the shape,
the dtype and the bytes in the file agree, so reading rows can only fail with the disk.
Rows are those of the 2-D view ``[prod(shape[:-1]), shape[-1]]``.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..files import reason
from ..meter import reading
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
# (tensor, first row, last row + 1) to the bytes [rows, bytes a row]: `read_raw` or `map_raw`
Raw: TypeAlias = "Callable[[TensorInfo, int, int], NDArray[np.uint8]]"

_LEAST_MAPPED = 1 << 20  # bytes; less is copied sooner than mapped
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14


def read_raw(info: TensorInfo, lo: int, hi: int) -> NDArray[np.uint8]:
    """The bytes ``[hi - lo, bytes a row]`` of rows lo to hi, in memory of their own.

    Read, not mapped: a file that shrinks under a mapping kills the process.
    """
    width = info.nbytes // info.rows if info.rows else 0
    out = np.empty((hi - lo, width), np.uint8)
    try:
        with reading(), open(info.path, "rb", buffering=0) as file:
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


def map_raw(info: TensorInfo, lo: int, hi: int) -> NDArray[np.uint8]:
    """The same bytes as `read_raw`, where it can be done as the page cache holds them, read-only:
    for whoever copies them away at once. They are unmapped with the last array over them.

    Every page is fetched here, by a system call that says what fails; so what a shorter file or a
    bad disk does is an error here and not a signal later. (A file that shrinks within the
    milliseconds between this and the copy would still be one.)
    """
    width = info.nbytes // info.rows if info.rows else 0
    size, first = (hi - lo) * width, info.offset + lo * width
    madvise = _madvise()
    if madvise is None or size < _LEAST_MAPPED:
        return read_raw(info, lo, hi)
    skip = first % mmap.ALLOCATIONGRANULARITY
    with reading():
        try:
            fd = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # all of it asked for at once, where the disk has it
                os.posix_fadvise(fd, first, size, os.POSIX_FADV_WILLNEED)
                pages = mmap.mmap(fd, skip + size, offset=first - skip, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            mapped = np.frombuffer(pages, np.uint8)
            there = madvise(mapped.ctypes.data, skip + size, _POPULATE_READ) == 0
        except (OSError, ValueError):  # ValueError: the file is shorter than that
            there = False
    if not there:
        return read_raw(info, lo, hi)  # its error has the words
    return mapped[skip:].reshape(hi - lo, width)


def can_map() -> bool:
    """Whether `map_raw` maps on this system."""
    return _madvise() is not None


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """madvise(2) without the interpreter's lock; None where pages cannot be fetched with it."""
    if not hasattr(os, "posix_fadvise"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    one = mmap.mmap(-1, mmap.PAGESIZE)
    at = np.frombuffer(one, np.uint8).ctypes.data
    found: Callable[[int, int, int], int] = function
    return found if found(at, mmap.PAGESIZE, _POPULATE_READ) == 0 else None


def read_plain(info: TensorInfo, lo: int, hi: int, raw: Raw = read_raw) -> NDArray[Any]:
    """Rows lo to hi in the dtype of the file, ``[hi - lo, K]``."""
    dtype: np.dtype[Any] = ITEM[info.dtype]
    values: NDArray[Any] = raw(info, lo, hi).view(dtype)
    return values.astype(dtype.newbyteorder("="), copy=False)


def read_f32(info: TensorInfo, lo: int, hi: int, raw: Raw = read_raw) -> F32:
    """Rows lo to hi as float32 ``[hi - lo, K]``; exact, all values finite."""
    if info.decode is not None:
        values = info.decode(raw(info, lo, hi))
    else:
        plain = read_plain(info, lo, hi, raw)
        if info.dtype == "BF16":
            return _widen(_finite_bits(plain, info))
        values = plain if info.dtype == "F32" else f16_to_f32(plain)
    # the largest magnitude is NaN or inf if any is: one pass, no temporary of booleans
    if values.size and not (np.isfinite(values.max()) and np.isfinite(values.min())):
        raise non_finite(info)
    return values


def read_bf16(info: TensorInfo, lo: int, hi: int, raw: Raw = read_raw) -> Bits:
    """Rows lo to hi as bf16 bits ``[hi - lo, K]``, rounded to nearest even; all finite."""
    if info.dtype == "BF16" and info.decode is None:
        return _finite_bits(read_plain(info, lo, hi, raw), info)
    bits = f32_to_bf16(read_f32(info, lo, hi, raw))
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
    # Of either sign, what is not finite has the largest bits: 0xFF80 (minus infinity) or more with
    # the sign, and among the others, which are the positive int16, 0x7F80 or more. No temporary.
    return not bits.size or (int(bits.max()) < 0xFF80 and int(bits.view(np.int16).max()) < 0x7F80)


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
