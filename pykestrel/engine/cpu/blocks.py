"""How a matrix lies in memory: column blocks of codes, made from rows ``[N, K]`` and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...quant import GROUP, QTensor, concat_rows, n_groups
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

    def split(self) -> Iterator[Block]:
        """Its blocks."""
        width = self.codes.shape[-1]
        for i, codes in enumerate(self.codes):
            lo = self.lo + i * width
            scales = None if self.scales is None else self.scales[i]
            yield Block(lo, lo + width, self.kind, codes, scales)

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
Ranges: TypeAlias = "Sequence[tuple[int, int, RowRange]]"  # of blocks: lo, hi, rows of parts


def row_ranges(parts: Sequence[Matrix]) -> Ranges:
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


@dataclass(frozen=True, eq=False)
class Filling:
    """Rows of a part that are columns of neighbouring blocks: all of them, or some of one."""

    codes: NDArray[Any]  # [b, K', w], K' = bytes of codes in a column, or Kp of bf16
    scales: F32 | None  # [b, G, w]
    part: Matrix  # b * w rows

    def fill(self) -> None:
        count, _, width = self.codes.shape
        if not isinstance(self.part, QTensor):
            k = self.part.shape[-1]
            transpose(self.part.reshape(count, width, k), self.codes[:, :k])
            self.codes[:, k:] = 0
            return
        assert self.scales is not None
        # of q4, code + 8 to two's complement, in both nibbles
        flip = 0x88 if self.part.kind == "q4" else 0
        transpose(self.part.codes.reshape(count, width, -1), self.codes, flip)
        transpose(self.part.scales.reshape(count, width, -1), self.scales)
        if flip:
            np.divide(self.scales, np.float32(16), out=self.scales)


def room(ranges: Ranges, groups: int) -> int:
    """Bytes of the blocks."""
    return sum(block_bytes(kind_of(rows[0][0]), groups, hi - lo) for lo, hi, rows in ranges)


def make_panels(ranges: Ranges, groups: int, buffer: NDArray[np.uint8]) -> list[Panel]:
    """The blocks in ``buffer``, one behind another, as few panels, of any content."""
    found: list[Panel] = []
    begin = 0
    for (kind, width), same in groupby(ranges, _shape):
        members = list(same)
        end = begin + len(members) * block_bytes(kind, groups, width)
        found.append(_panel(members[0][0], kind, groups, width, buffer[begin:end]))
        begin = end
    return found


def fillings(ranges: Ranges, panels: Sequence[Panel], together: int) -> Iterator[Filling]:
    """What fills the panels, each alone and by any thread: of ``together`` bytes of codes, or a
    block. It is a few calls of NumPy, whatever its size is."""
    left = iter(ranges)
    for panel in panels:
        members = list(islice(left, len(panel.codes)))
        yield from _fillings(panel, [rows for _, _, rows in members], together)


def _shape(block: tuple[int, int, RowRange]) -> tuple[str, int]:
    lo, hi, rows = block
    return kind_of(rows[0][0]), hi - lo


def _panel(lo: int, kind: str, groups: int, width: int, buffer: NDArray[np.uint8]) -> Panel:
    """Blocks one behind another in ``buffer``."""
    flat = buffer.reshape(-1, block_bytes(kind, groups, width))
    size = groups * _CODE_BYTES[kind] * width
    codes: NDArray[Any] = flat[:, :size]
    if kind == "bf16":
        return Panel(
            lo, kind, codes.view(np.uint16).reshape(len(flat), groups * GROUP, width), None
        )
    codes = codes.view(np.int8 if kind == "q8" else np.uint8)
    at = _aligned(size)
    scales = flat[:, at : at + 4 * groups * width].view(np.float32)
    return Panel(
        lo,
        kind,
        codes.reshape(len(flat), groups, -1, width),
        scales.reshape(len(flat), groups, width),
    )


def _fillings(panel: Panel, blocks: Sequence[RowRange], together: int) -> Iterator[Filling]:
    width = panel.codes.shape[-1]
    codes = panel.codes.reshape(len(blocks), -1, width)
    most = max(1, together // codes[0].nbytes)
    i = 0
    while i < len(blocks):
        count = _alike(blocks[i : i + most], width)
        part, first, _ = blocks[i][0]
        ranges = [(part, first, first + count * width)] if count else blocks[i]
        count = max(1, count)
        begin = 0
        for part, lo, hi in ranges:
            end = begin + (hi - lo) // count
            scales = None if panel.scales is None else panel.scales[i : i + count, :, begin:end]
            rows = part.rows(lo, hi) if isinstance(part, QTensor) else part[lo:hi]
            yield Filling(codes[i : i + count, :, begin:end], scales, rows)
            begin = end
        i += count


def _alike(blocks: Sequence[RowRange], width: int) -> int:
    """How many of the first blocks are neighbouring rows of one part, whole blocks of it."""
    part, at, _ = blocks[0][0]
    for i, rows in enumerate(blocks):
        following, lo, hi = rows[0]
        if following is not part or lo != at or hi - lo != width:
            return i
        at = hi
    return len(blocks)


def arrays_of(part: Matrix) -> list[NDArray[Any]]:
    return [part.codes, part.scales] if isinstance(part, QTensor) else [part]


def rows_in(parts: Sequence[Matrix], buffer: NDArray[np.uint8]) -> list[Matrix]:
    """Room for the rows of ``parts`` in ``buffer``, where their blocks have room: float32 scales
    take more than float16."""
    found: list[Matrix] = []
    begin = 0
    for part in parts:
        arrays = []
        for array in arrays_of(part):
            end = begin + array.nbytes
            arrays.append(buffer[begin:end].view(array.dtype).reshape(array.shape))
            begin = end
        found.append(
            QTensor(part.kind, part.shape, *arrays) if isinstance(part, QTensor) else arrays[0]
        )
    return found


def rows_of(parts: Sequence[Matrix], lo: int, hi: int) -> Matrix:
    """Rows ``lo`` to ``hi`` of ``parts`` stacked, which are of one kind; a view where they are of
    one part."""
    quantised: list[QTensor] = []
    bits: list[NDArray[np.uint16]] = []
    for part in parts:
        n = int(part.shape[-2])
        first, last = max(lo, 0), min(hi, n)
        lo, hi = lo - n, hi - n
        if first >= last:
            continue
        if isinstance(part, QTensor):
            quantised.append(part.rows(first, last))
        else:
            bits.append(part[first:last])
    assert not (quantised and bits), "rows of two kinds"
    if quantised:
        return quantised[0] if len(quantised) == 1 else concat_rows(quantised)
    return bits[0] if len(bits) == 1 else np.concatenate(bits)


def stored_rows(block: Block, rows: slice) -> tuple[NDArray[Any], NDArray[np.float16] | None]:
    """The inverse of `Filling` for some output features."""
    flat = block.codes.reshape(-1, block.hi - block.lo)[:, rows]
    codes = np.empty(flat.shape[::-1], flat.dtype)
    transpose(flat[None], codes[None], 0x88 if block.kind == "q4" else 0)
    if block.scales is None:
        return codes, None
    scales = block.scales[:, rows]
    if block.kind == "q4":
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


def transpose(rows: NDArray[Any], out: NDArray[Any], flip: int = 0) -> None:
    """``out [b, C, R] = rows.T`` of each of ``rows [b, R, C]``; ``flip``: bits of a byte that are
    the other way round there.

    NumPy copies element by element, and of a byte that is a cache line for a byte. Words of eight
    bytes are transposed first, then the bytes within them: each pass moves what lies together.
    """
    batch, count, columns = rows.shape
    each = 8 // rows.itemsize
    turned = rows.transpose(0, 2, 1)
    if rows.itemsize == 8 or columns % each or rows.strides[2] != rows.itemsize:
        out[...] = turned ^ rows.dtype.type(flip) if flip else turned
        return
    turned = rows.view(np.uint64).transpose(0, 2, 1)
    if flip:
        words = np.bitwise_xor(turned, np.uint64(flip * 0x0101010101010101), order="C")
    else:
        words = np.ascontiguousarray(turned)
    within = words.view(rows.dtype).reshape(batch, columns // each, count, each)
    out.reshape(batch, columns // each, each, count)[...] = within.transpose(0, 1, 3, 2)
