"""Matrices of the CPU engine into the device's cache, piece by piece: there is no second copy of a
whole one in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ... import native
from ...native import Handle
from ...native.weights import Proj
from ...quant import QTensor
from ..cpu.linear import Linear, Place
from ..cuda.plan import Entry
from .plan import Stacks, Weight

F32: TypeAlias = NDArray[np.float32]

_PIECE: Final = 16 << 20  # weights of one upload


def upload(handle: Handle, weight: Weight, linear: Linear) -> None:
    """One matrix, pinned."""
    native.cache_begin(handle, weight.key, weight.matrix)
    _put(handle, weight, 0, linear, range(linear.n))
    native.cache_end(handle, weight.key)


def upload_stacks(
    handle: Handle, stacks: Stacks, linears: Mapping[Place, Linear], router: F32
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
            for e in range(matrix.stack):
                linear = linears[Place(kind, stacks.layer, e)]
                _put(handle, entry, e * matrix.n, linear, range(lo, lo + matrix.n))
        native.cache_end(handle, entry.key)


def _put(handle: Handle, entry: Weight | Entry, row: int, linear: Linear, rows: range) -> None:
    """Rows of a matrix to those from ``row`` on of a begun entry."""
    piece = max(1, _PIECE // max(1, linear.k))
    for lo in range(rows.start, rows.stop, piece):
        part = linear.stored(lo, min(rows.stop, lo + piece))
        at = row + lo - rows.start
        if isinstance(part, QTensor):
            native.cache_rows(handle, entry.key, entry.matrix, at, part.codes, part.scales)
        else:
            native.cache_rows(handle, entry.key, entry.matrix, at, part)
