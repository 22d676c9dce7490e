"""What runs a forward pass. `CpuEngine` (NumPy) is the meaning of the program; every other engine
is judged against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Engine(Protocol):
    """One sequence with its K/V; `position` tokens of it have been seen."""

    ctx_size: int  # positions that the K/V can hold
    vocab_size: int

    @property
    def name(self) -> str:
        """What computes now: "cpu", "cuda" or "offload", which is both."""

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


@dataclass(frozen=True)
class Want:
    """What a sampler needs of the next logits, where that is less than all of them."""

    vocab_limit: int  # ids at and above it are not looked at
    top: int = 0  # how many of the largest logits; 0: only which id has the largest
    temperature: float = 1.0  # of `Candidates.sum_exp`


@dataclass(frozen=True)
class Picked:
    """The id of the largest logit, the lowest one on a tie."""

    id: int


@dataclass(frozen=True, eq=False)
class Candidates:
    """The largest logits; of equal ones at the end of the list some may be missing."""

    ids: NDArray[np.int32]  # [n]
    logits: NDArray[np.float32]  # [n], falling; equal ones by rising id
    sum_exp: float  # over all ids below the limit of exp((logit - largest) / temperature), about


Answer: TypeAlias = "NDArray[np.float32] | Picked | Candidates"


@runtime_checkable
class PickingEngine(Protocol):
    """What an engine offers besides when a whole vocabulary need not leave its device."""

    def step(self, ids: Sequence[int], want: Want) -> Answer:
        """`Engine.forward`, answered by what ``want`` asks for, or by all logits instead."""

    def last_logits(self) -> NDArray[np.float32]:
        """All logits ``[vocab_size]`` of the last token of the last `step`."""


@runtime_checkable
class FillingEngine(Protocol):
    """What an engine offers besides for measurements at depth."""

    def fill(self, position: int, seed: int = 0) -> None:
        """Be at ``position`` with random K/V rows behind it."""
