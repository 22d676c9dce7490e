"""What runs a forward pass. `CpuEngine` (NumPy) is the meaning of the program; every other engine
is judged against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Engine(Protocol):
    """One sequence with its K/V; `position` tokens of it have been seen."""

    name: str  # "cpu" | "cuda"
    ctx_size: int  # positions that the K/V can hold
    vocab_size: int

    @property
    def position(self) -> int:
        """How many tokens the K/V holds: the position of the next token."""

    def forward(self, ids: Sequence[int], *, all_logits: bool = False) -> NDArray[np.float32]:
        """Append ``ids`` (one: decode; many: prefill) and return the logits.

        Returns float32 ``[vocab_size]`` of the last token, or ``[len(ids), vocab_size]`` with
        ``all_logits``; the array is the caller's. Raises ContextError, before anything changed,
        when ``position + len(ids) > ctx_size``; NumericsError names the layer of a NaN, and leaves
        ``position`` where it was.
        """

    def truncate(self, position: int) -> None:
        """Forget the K/V at and after ``position`` (0 <= position <= self.position)."""

    def close(self) -> None:
        """Free the memory; idempotent."""
