"""Matrices of the CPU engine into the device's cache, piece by piece: there is no second copy of a
whole one in the host's memory. Of one that is laid out a piece is turned back into rows first,
which takes longer than sending it, so a few are turned at a time, each by a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ... import native
from ...native import Handle
from ...native.weights import Proj
from ...quant import QTensor
from ...weights import Matrix
from ..cpu.linear import Linear, Place
from ..cpu.workers import INLINE, Scratch, Workers
from ..cuda.plan import Entry
from .plan import Stacks, Weight

F32: TypeAlias = NDArray[np.float32]

# Of an entry: where rows of a matrix go, and which.
Piece: TypeAlias = "tuple[int, Linear, int, int]"

_PIECE: Final = 4 << 20  # weights of one upload
_TOGETHER: Final = 16  # pieces in memory at a time
UPLOAD_THREADS: Final = 8  # that turn pieces; more wait for each other's GIL


def upload(handle: Handle, weight: Weight, linear: Linear, workers: Workers | None = None) -> None:
    """One matrix, pinned. workers: None: the caller's thread alone."""
    native.cache_begin(handle, weight.key, weight.matrix)
    _put(handle, weight, _pieces(0, linear, 0, linear.n), workers)
    native.cache_end(handle, weight.key)


def upload_stacks(
    handle: Handle,
    stacks: Stacks,
    linears: Mapping[Place, Linear],
    router: F32,
    workers: Workers | None = None,
) -> None:
    """The experts of a layer and their router [E, H], pinned."""
    for entry in stacks.entries:
        matrix = entry.matrix
        native.cache_begin(handle, entry.key, matrix)
        if entry.proj == Proj.ROUTER:
            native.cache_rows(handle, entry.key, matrix, 0, router)
        else:
            kind = "expert_down" if entry.proj == Proj.DOWN else "expert_gate_up"
            lo = matrix.n if entry.proj == Proj.UP else 0  # behind those of the gate
            pieces = (
                piece
                for e in range(matrix.stack)
                for piece in _pieces(
                    e * matrix.n, linears[Place(kind, stacks.layer, e)], lo, lo + matrix.n
                )
            )
            _put(handle, entry, pieces, workers)
        native.cache_end(handle, entry.key)


def _pieces(to: int, linear: Linear, begin: int, end: int) -> Iterable[Piece]:
    """Rows ``begin`` to ``end`` of a matrix, to those from ``to`` on."""
    step = max(1, _PIECE // max(1, linear.k))
    for lo in range(begin, end, step):
        yield to + lo - begin, linear, lo, min(end, lo + step)


def _put(
    handle: Handle, entry: Weight | Entry, pieces: Iterable[Piece], workers: Workers | None
) -> None:
    """To a begun entry."""
    left = iter(pieces)
    while batch := list(islice(left, _TOGETHER)):
        for (to, *_), rows in zip(batch, _turned(batch, workers or INLINE), strict=True):
            if isinstance(rows, QTensor):
                native.cache_rows(handle, entry.key, entry.matrix, to, rows.codes, rows.scales)
            else:
                native.cache_rows(handle, entry.key, entry.matrix, to, rows)


def _turned(batch: Sequence[Piece], workers: Workers) -> list[Matrix]:
    """The rows of each piece, as they were given."""
    found: dict[int, Matrix] = {}

    def turn(i: int, scratch: Scratch) -> None:
        _, linear, lo, hi = batch[i]
        found[i] = linear.stored(lo, hi)

    workers.run(turn, range(len(batch)))
    return [found[i] for i in range(len(batch))]
