"""Matrix products with weights that stay quantised.

A `Linear` holds one matrix, or several stacked along N, as column blocks: the codes of up to
512 output features, transposed to ``[K, width]``. In this layout a group's scales are one
contiguous row, so every NumPy loop is 512 long; as ``[N, K]`` rows they would be 32 long, and
half as fast (docs/cpu-engine.md has the measurements). One row of activations is multiplied from
the codes, a few blocks at a time, on the engine's own threads. Many rows go through BLAS: a tile of
blocks is expanded to float32 and multiplied, or the whole matrix when `WeightCache` keeps it.

Shapes: M rows of activations, N outputs, K inputs, Kp = K rounded up to a multiple of 32,
G = Kp / 32, w the width of a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import OutOfMemory
from ...quant import GROUP, QTensor, bf16_to_f32, dequantize, n_groups
from ...units import show_bytes
from ...weights import Matrix
from .blocks import (
    Block,
    Panel,
    Ranges,
    arrays_of,
    fillings,
    make_panels,
    room,
    row_ranges,
    rows_in,
    rows_of,
    stored_rows,
)
from .store import Store
from .workers import INLINE, Scratch, Workers

F32: TypeAlias = NDArray[np.float32]

_TILE = 4  # blocks expanded for one BLAS call
_ALONE = 1 << 20  # codes: multiplying fewer takes less time than waking another thread saves
_SHARE = 3 << 20  # codes of each thread: with fewer, passing the GIL takes longer than multiplying
_PANEL = 4  # blocks multiplied together at most: a quarter of the calls for which the GIL is needed
_PANEL_CODES = 4 << 20  # of more than one block: more unpacked q4 codes than a cache holds are slow
_LAID_OUT = 1 << 20  # bytes at least of each thread that lays a matrix out
_TOGETHER = 8 << 20  # and at most of what it does at a time: more would need more memory besides
LAYING_OUT = 8  # threads that lay experts out; 16 wait for each other's GIL (2.8 GB/s, by 8 4.2)
FEW_ROWS = 2  # up to so many rows reading the codes row by row beats expanding them
_BF16_ROWS = 128  # rows of a bf16 block expanded at a time: 256 KB, in the L2


class Place(NamedTuple):
    """Which of a model's matrices a `Linear` is."""

    kind: str  # "qkv" | "o" | "gate_up" | "down" | "expert_gate_up" | "expert_down" | "head"
    layer: int = -1  # -1: the head
    expert: int = -1

    def __str__(self) -> str:
        words = self.kind if self.layer < 0 else f"{self.kind} of layer {self.layer}"
        return words if self.expert < 0 else f"{words}, expert {self.expert}"


class Linear:
    """``y [M, N] = x [M, K] @ W.T + bias``; ``parts`` are stacked along N and not kept.

    ``workers``: who lays them out. With ``later`` they are copied as they are, and laid out in the
    same memory when something is multiplied. ``seldom``: of `Store.take`.
    """

    def __init__(
        self,
        parts: Sequence[Matrix],
        bias: F32 | None,
        workers: Workers,
        place: Place,
        store: Store | None = None,
        *,
        seldom: bool = False,
        later: bool = False,
    ) -> None:
        self.place = place
        self.k = int(parts[0].shape[-1])
        self.n = sum(int(part.shape[-2]) for part in parts)
        self.groups = n_groups(self.k)
        self.bias = bias
        self.expanded: F32 | None = None  # [K, N] while the cache keeps it
        self.uses = 0  # counted by the cache
        ranges = row_ranges(parts)
        # One buffer for all blocks: NumPy asks for huge pages from 4 MB on, which makes reading
        # the codes 6 to 9 % faster.
        self._buffer = (store or Store()).take(room(ranges, self.groups), seldom=seldom)
        self._panels = make_panels(ranges, self.groups, self._buffer)
        self._blocks = [block for panel in self._panels for block in panel.split()]
        self._rows: list[Matrix] | None = None  # in the buffer, until it holds the blocks
        self._moving: NDArray[np.uint8] | None = None  # blocks that are to go there first
        if later:
            self._rows = rows_in(parts, self._buffer)
            workers.run(_copy, list(_pieces(parts, self._rows)))
        else:
            _fill(ranges, self._panels, workers)

    @property
    def laid_out(self) -> bool:
        return self._rows is None

    def lay_out(self, workers: Workers) -> None:
        """Have the blocks, if the rows are as they came. They are made elsewhere first: whatever
        interrupts that, the rows are whole, or the blocks are and are moved the next time."""
        if (rows := self._rows) is not None:
            try:
                made = np.empty(len(self._buffer), np.uint8)
                ranges = row_ranges(rows)
                _fill(ranges, make_panels(ranges, self.groups, made), workers)
            except MemoryError:
                raise OutOfMemory(
                    f"laying out {self.place} needs {show_bytes(len(self._buffer))} for a moment, "
                    "which could not be had; close other programs, or take a smaller --ctx-size"
                ) from None
            self._moving = made
            self._rows = None
        if self._moving is not None:
            np.copyto(self._buffer, self._moving)
            self._moving = None

    @property
    def blocks(self) -> list[Block]:
        self.lay_out(INLINE)
        return self._blocks

    @property
    def panels(self) -> list[Panel]:
        self.lay_out(INLINE)
        return self._panels

    @property
    def expanded_bytes(self) -> int:
        return 4 * self.groups * GROUP * self.n

    @property
    def nbytes(self) -> int:
        total = 0 if self.bias is None else self.bias.nbytes
        for panel in self._panels:
            total += panel.codes.nbytes + (0 if panel.scales is None else panel.scales.nbytes)
        return total

    def expand(self, workers: Workers) -> F32:
        """The whole matrix as float32 ``[K, N]``, in the order that sgemv reads fastest.

        BLAS gives each thread a range of N. In C order that is a piece of every row, which for a
        short row is too little to stream (1536 x 576: 22 GB/s, in Fortran order 27).
        """
        self.lay_out(workers)
        shape = (self.groups * GROUP, self.n)
        full = np.empty(shape, np.float32, order="F" if self.n < self.k else "C")
        workers.run(_expand_into, [(b, full[:, b.lo : b.hi]) for b in self.blocks])
        return full[: self.k]

    def stored(self, lo: int, hi: int) -> Matrix:
        """Output features ``lo`` to ``hi``, which are of one kind, as they were given: bf16 bits or
        a `QTensor`."""
        if (rows := self._rows) is not None:
            return rows_of(rows, lo, hi)
        blocks = [b for b in self.blocks if b.lo < hi and lo < b.hi]
        parts = [
            stored_rows(block, slice(max(lo, block.lo) - block.lo, min(hi, block.hi) - block.lo))
            for block in blocks
        ]
        codes = np.concatenate([codes for codes, _ in parts])
        if blocks[0].kind == "bf16":
            return np.ascontiguousarray(codes[:, : self.k])
        scales = np.concatenate([scales for _, scales in parts if scales is not None])
        return QTensor(blocks[0].kind, (hi - lo, self.k), codes, scales)

    def row(self, index: int) -> F32:
        """Output feature ``index`` as float32 ``[K]``: a tied head's embedding of one token."""
        if (rows := self._rows) is not None:
            one = rows_of(rows, index, index + 1)
            row: F32 = (dequantize(one) if isinstance(one, QTensor) else bf16_to_f32(one))[0]
            return row
        block = self.blocks[bisect_right(self.blocks, index, key=lambda block: block.lo) - 1]
        at = slice(index - block.lo, index - block.lo + 1)
        scales = None if block.scales is None else block.scales[:, at]
        out = np.empty((self.groups * GROUP, 1), np.float32)
        _expand_into((Block(0, 1, block.kind, block.codes[..., at], scales), out), Scratch())
        return out[: self.k, 0]


def lay_out_all(linears: Iterable[Linear], workers: Workers) -> None:
    """Those that are not laid out yet: large ones by all threads, of experts each by one."""
    late = dict.fromkeys(linear for linear in linears if not linear.laid_out)
    experts = [linear for linear in late if linear.place.expert >= 0]
    for linear in late:
        if linear.place.expert < 0:
            linear.lay_out(workers)
    if experts:
        workers.run(lambda linear, _: linear.lay_out(INLINE), experts, LAYING_OUT)


def _fill(ranges: Ranges, panels: Sequence[Panel], workers: Workers) -> None:
    size = sum(panel.codes.nbytes for panel in panels)
    together = min(_TOGETHER, max(_LAID_OUT, size // workers.count))
    work = list(fillings(ranges, panels, together))
    workers.run(lambda one, _: one.fill(), work, -(-size // _LAID_OUT))


def _pieces(
    parts: Sequence[Matrix], to: Sequence[Matrix]
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Arrays of some rows, and where they go."""
    for part, there in zip(parts, to, strict=True):
        for array, copy in zip(arrays_of(part), arrays_of(there), strict=True):
            step = max(1, _TOGETHER // array[0].nbytes)
            for lo in range(0, len(array), step):
                yield array[lo : lo + step], copy[lo : lo + step]


def _copy(item: tuple[NDArray[Any], NDArray[Any]], _: Scratch) -> None:
    np.copyto(item[1], item[0])


def multiply(linear: Linear, x: F32, out: F32, workers: Workers) -> None:
    """``out [M, N] = x [M, K] @ W.T + bias``, both C-contiguous; through BLAS when expanded."""
    if linear.expanded is None:
        multiply_codes(linear, x, out, workers)
        return
    np.matmul(x, linear.expanded, out=out)
    if linear.bias is not None:
        out += linear.bias


def multiply_codes(linear: Linear, x: F32, out: F32, workers: Workers) -> None:
    """The same from the codes."""
    if len(x) <= FEW_ROWS:
        multiply_rows([(linear, x[i], out[i]) for i in range(len(x))], workers)
        return
    _multiply_tiles(linear, x, out, workers)
    if linear.bias is not None:
        out += linear.bias


def multiply_rows(rows: Sequence[tuple[Linear, F32, F32]], workers: Workers) -> None:
    """``(linear, x [K], out [N])`` for every entry, from the codes, as one parallel job."""
    lay_out_all((linear for linear, _, _ in rows), workers)
    codes = sum(linear.n * linear.k for linear, _, _ in rows)
    threads = min(workers.count, 1 if codes < _ALONE else max(2, -(-codes // _SHARE)))
    blocks = sum(len(linear.blocks) for linear, _, _ in rows)
    most = min(_PANEL, -(-blocks // threads))
    items = []
    for linear, x, out in rows:
        x_groups = _grouped(x, linear)
        for panel in linear.panels:
            of_block = linear.groups * GROUP * panel.codes.shape[-1]
            step = max(1, min(most, _PANEL_CODES // of_block))
            for lo in range(0, len(panel.codes), step):
                items.append((panel.part(lo, lo + step), x_groups, out))
    workers.run(_multiply_panel, items, threads)
    for linear, _, out in rows:
        if linear.bias is not None:
            out += linear.bias


def _multiply_tiles(linear: Linear, x: F32, out: F32, workers: Workers) -> None:
    linear.lay_out(workers)
    for i in range(0, len(linear.blocks), _TILE):
        blocks = linear.blocks[i : i + _TILE]
        lo, hi = blocks[0].lo, blocks[-1].hi
        tile = workers.scratch.get("tile", linear.groups * GROUP, hi - lo)
        workers.run(_expand_into, [(b, tile[:, b.lo - lo : b.hi - lo]) for b in blocks])
        np.matmul(x, tile[: linear.k], out=out[:, lo:hi])


def _grouped(x: F32, linear: Linear) -> F32:
    """``x [K]`` as ``[G, 32]``; a K that is no multiple of 32 is padded with zeros."""
    if linear.k == linear.groups * GROUP:
        return x.reshape(linear.groups, GROUP)
    padded = np.zeros((linear.groups, GROUP), np.float32)
    padded.reshape(-1)[: linear.k] = x
    return padded


def _multiply_panel(item: tuple[Panel, F32, F32], scratch: Scratch) -> None:
    """Blocks times one row: of each ``y = sum_g scales[g] * (x[g] @ codes[g])``."""
    panel, x, out = item
    count, width = len(panel.codes), panel.codes.shape[-1]
    y = out[panel.lo : panel.lo + count * width].reshape(count, width)
    if panel.scales is None:
        for codes, of_block in zip(panel.codes, y, strict=True):
            _multiply_bf16(codes, x.reshape(-1), of_block, scratch)
        return
    codes = panel.codes if panel.kind == "q8" else _unpack_q4(panel.codes, scratch)
    partial = scratch.get("partial", count, len(x), width)
    # c_einsum casts 8192 codes at a time into a buffer and accumulates from there: cast and dot
    # product in one pass over the L1, outside the GIL, and without BLAS and its spinning threads.
    np.einsum("gk,bgkn->bgn", x, codes, out=partial, dtype=np.float32, casting="unsafe")
    np.einsum("bgn,bgn->bn", partial, panel.scales, out=y)


def _multiply_bf16(bits: NDArray[np.uint16], x: F32, y: F32, scratch: Scratch) -> None:
    rows, width = bits.shape
    step = _BF16_ROWS
    partial = scratch.get("partial", -(-rows // step), width)
    for i, lo in enumerate(range(0, rows, step)):
        part = bits[lo : lo + step]
        tile = scratch.get("bf16", *part.shape)
        _widen_bf16(part, tile)
        np.einsum("k,kn->n", x[lo : lo + step], tile, out=partial[i])
    np.add.reduce(partial, axis=0, out=y)


def _expand_into(item: tuple[Block, F32], scratch: Scratch) -> None:
    """The float32 values of a block into ``out [Kp, w]`` (of any strides)."""
    block, out = item
    if out.strides[0] < out.strides[1]:  # Fortran order: transposed at the end, in one pass
        tile = scratch.get("transposed", *out.shape)
        _expand_into((block, tile), scratch)
        np.copyto(out, tile)
        return
    if block.scales is None:
        _widen_bf16(block.codes, out)
        return
    groups, width = block.scales.shape
    codes = block.codes if block.kind == "q8" else _unpack_q4(block.codes, scratch)
    # Splitting the first axis of `out` never copies, whatever the stride of its rows is.
    grouped = out.reshape(groups, GROUP, width)
    np.copyto(grouped, codes)
    grouped *= block.scales[:, None, :]


def _unpack_q4(codes: NDArray[np.uint8], scratch: Scratch) -> NDArray[np.int8]:
    """Nibbles ``[.., 16, w]`` to int8 ``[.., 32, w]``, 16 times the code each.

    The nibbles are two's complement (see `Filling`), so that moving one to the top of its
    byte is all there is to do, and the factor 16 is taken out of the scales.
    """
    *of, half, width = codes.shape
    words = scratch.get("nibbles", codes.size // 2 + 1)
    out = words.view(np.uint8)[: 2 * codes.size].reshape(*of, GROUP, width)
    # A multiplication wraps like a shift by 4; NumPy vectorises the first and not the second.
    np.multiply(codes, np.uint8(16), out=out[..., :half, :])
    np.bitwise_and(codes, np.uint8(0xF0), out=out[..., half:, :])
    return out.view(np.int8)


def _widen_bf16(bits: NDArray[np.uint16], out: F32) -> None:
    words = out.view(np.uint32)
    np.copyto(words, bits)
    np.left_shift(words, 16, out=words)
