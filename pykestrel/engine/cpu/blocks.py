"""How a matrix lies in memory: column blocks of codes, made from rows ``[N, K]`` and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...quant import GROUP, QTensor, n_groups
from ...weights import Matrix

F32: TypeAlias = NDArray[np.float32]

BLOCK = 512  # output features of a block: 512 * 32 int8 codes and their partial sums stay in the L1


@dataclass(frozen=True, eq=False)
class Block:
    """Output features ``lo`` to ``hi`` of a `Linear`."""

    lo: int
    hi: int
    kind: str  # "q8" | "q4" | "bf16"
    codes: NDArray[Any]  # q8: int8 [G, 32, w]; q4: uint8 [G, 16, w]; bf16: uint16 [Kp, w]
    scales: F32 | None  # [G, w]; q4: a 16th, because its codes are unpacked 16-fold; bf16: None


@dataclass(frozen=True, eq=False)
class Panel:
    """Neighbouring blocks of one kind and width, from output feature ``lo`` on: NumPy does with all
    of them in one call what it does with one, in the same order."""

    lo: int
    kind: str
    codes: NDArray[Any]  # [b, ...]: those of the blocks
    scales: F32 | None  # [b, G, w]

    def part(self, begin: int, end: int) -> Panel:
        scales = None if self.scales is None else self.scales[begin:end]
        lo = self.lo + begin * self.codes.shape[-1]
        return Panel(lo, self.kind, self.codes[begin:end], scales)


def laid_out_bytes(kind: str, n: int, k: int) -> int:
    """What a `Linear` of parts of one kind takes, n rows in all."""
    limit = _block_width(n)
    widths = [limit] * (n // limit) + ([n % limit] if n % limit else [])
    return sum(block_bytes(kind, n_groups(k), width) for width in widths)


def _block_width(n: int) -> int:
    """Blocks are about equally wide, and a few are an even number: threads should end together."""
    count = -(-n // BLOCK)
    if 1 < count < 8:
        count += count % 2
    return max(1, -(-n // max(1, count)))


RowRange: TypeAlias = "list[tuple[Matrix, int, int]]"


def row_ranges(parts: Sequence[Matrix]) -> list[tuple[int, int, RowRange]]:
    """``(lo, hi, rows)`` of every block; one block takes rows of several parts of one kind."""
    limit = _block_width(sum(int(part.shape[-2]) for part in parts))
    out: list[tuple[int, int, RowRange]] = []
    start = 0
    open_rows: RowRange = []
    width = 0

    def close() -> None:
        nonlocal start, open_rows, width
        if width:
            out.append((start, start + width, open_rows))
        start, open_rows, width = start + width, [], 0

    for part in parts:
        if open_rows and kind_of(open_rows[0][0]) != kind_of(part):
            close()
        lo, n = 0, int(part.shape[-2])
        while lo < n:
            hi = min(n, lo + limit - width)
            open_rows.append((part, lo, hi))
            width += hi - lo
            lo = hi
            if width == limit:
                close()
    close()
    return out


def kind_of(part: Matrix) -> str:
    return part.kind if isinstance(part, QTensor) else "bf16"


def panels(blocks: Sequence[Block], groups: int, buffer: NDArray[np.uint8]) -> list[Panel]:
    """All of ``blocks``, which lie one behind another in ``buffer``, as few panels."""
    found = []
    begin = 0
    for (kind, width), group in groupby(blocks, lambda block: (block.kind, block.hi - block.lo)):
        same = list(group)
        count, codes, scales = len(same), same[0].codes, same[0].scales
        nbytes = block_bytes(kind, groups, width)
        flat = buffer[begin : begin + count * nbytes].reshape(count, nbytes)
        begin += count * nbytes
        all_codes = flat[:, : codes.nbytes].view(codes.dtype).reshape(count, *codes.shape)
        all_scales = None
        if scales is not None:
            at = _aligned(codes.nbytes)
            words = flat[:, at : at + scales.nbytes].view(np.float32)
            all_scales = words.reshape(count, *scales.shape)
        found.append(Panel(same[0].lo, kind, all_codes, all_scales))
    return found


def stored_rows(block: Block, rows: slice) -> tuple[NDArray[Any], NDArray[np.float16] | None]:
    """The inverse of `make_block` for some output features."""
    flat = block.codes.reshape(-1, block.hi - block.lo)[:, rows]
    codes = np.empty(flat.shape[::-1], flat.dtype)
    transpose(flat, codes)
    if block.scales is None:
        return codes, None
    scales = block.scales[:, rows]
    if block.kind == "q4":
        codes ^= np.uint8(0x88)
        scales = scales * np.float32(16)
    return codes, np.ascontiguousarray(scales.astype(np.float16).T)


_CODE_BYTES = {"q8": GROUP, "q4": GROUP // 2, "bf16": 2 * GROUP}  # of one group
_LINE = 64  # blocks and their parts begin at cache lines


def block_bytes(kind: str, groups: int, width: int) -> int:
    codes = groups * _CODE_BYTES[kind] * width
    scales = 0 if kind == "bf16" else 4 * groups * width
    return _aligned(codes) + _aligned(scales)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def make_block(lo: int, hi: int, rows: RowRange, buffer: NDArray[np.uint8]) -> Block:
    """Lay a block out in ``buffer``: its codes, then its scales."""
    kind = kind_of(rows[0][0])
    width = hi - lo
    groups = n_groups(int(rows[0][0].shape[-1]))
    size = groups * _CODE_BYTES[kind] * width
    if kind == "bf16":
        bits = buffer[:size].view(np.uint16).reshape(groups * GROUP, width)
        _transpose([part[a:b] for part, a, b in rows if not isinstance(part, QTensor)], bits)
        return Block(lo, hi, kind, bits, None)
    quantised = [part.rows(a, b) for part, a, b in rows if isinstance(part, QTensor)]
    dtype = quantised[0].codes.dtype
    codes = buffer[:size].view(dtype).reshape(groups, -1, width)
    _transpose([q.codes for q in quantised], codes.reshape(-1, width))
    start = _aligned(size)
    scales = buffer[start : start + 4 * groups * width].view(np.float32).reshape(groups, width)
    _transpose([q.scales for q in quantised], scales)
    if kind == "q4":
        codes ^= np.uint8(0x88)  # code + 8 to two's complement, in both nibbles
        scales /= np.float32(16)
    return Block(lo, hi, kind, codes, scales)


def _transpose(rows: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
    """Rows ``[w_i, K]``, one after the other, to columns of ``out [K', w]``, zeros below K."""
    lo = 0
    out[rows[0].shape[-1] :] = 0
    for part in rows:
        hi = lo + len(part)
        transpose(part, out[: part.shape[-1], lo:hi])
        lo = hi


def transpose(rows: NDArray[Any], out: NDArray[Any]) -> None:
    """``out [C, R] = rows.T`` of ``rows [R, C]``.

    NumPy copies element by element, and of a byte that is a cache line for a byte. Words of eight
    bytes are transposed first, then the bytes within them: each pass moves what lies together.
    """
    count, columns = rows.shape
    each = 8 // rows.itemsize
    if rows.itemsize == 8 or columns % each or rows.strides[1] != rows.itemsize:
        out[...] = rows.T
        return
    words = np.ascontiguousarray(rows.view(np.uint64).T).view(rows.dtype)
    within = words.reshape(columns // each, count, each).transpose(0, 2, 1)
    out.reshape(columns // each, each, count)[...] = within
