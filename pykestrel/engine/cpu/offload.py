"""What the CPU engine asks of a device before it computes something itself.

The engine's layer loop stays the only one: a device may take whole layers out of it, or single
products, and whatever it does not take is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .linear import Linear

F32: TypeAlias = NDArray[np.float32]


class Job(NamedTuple):
    """Rows ``[first, first + rows)`` of x times one matrix, to the rows from ``to`` on of out."""

    linear: Linear
    rows: int
    first: int = 0
    to: int = 0


# Computes every job, biases included: (x [.., K], out [.., N], jobs of matrices [N, K]).
Compute: TypeAlias = Callable[[F32, F32, Sequence[Job]], None]


class Offload(Protocol):
    """A device that takes some of the work."""

    def layers(self, first: int, x: F32, position: int) -> int:
        """Run layers from ``first`` on over ``x [M, H]``, the residual stream of the tokens at
        ``position`` and after, in place. The layer that is next: ``first`` when it ran none."""

    def products(self, x: F32, out: F32, jobs: Sequence[Job], on_cpu: Compute) -> None:
        """Compute every job; those that it does not take itself with ``on_cpu``."""
