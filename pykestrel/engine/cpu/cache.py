"""Which matrices are kept as float32, under a byte budget.

Every token reads every dense matrix once, in the same order. Under such cyclic access a
least-recently-used cache smaller than the cycle never hits, so dense matrices are chosen once, in
the order of the layers, and stay. Experts are chosen by the router: those used most often take
what is left of the budget.

Reading codes on the engine's threads and reading float32 through BLAS are about equally fast, but
not side by side: after a product the threads of OpenBLAS spin on the processors for some 20 ms.
So single tokens go through BLAS only when at least `_BLAS_SHARE` of what a token reads is
expanded; batches always take what is there (docs/cpu-engine.md has the measurements).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import OutOfMemory
from .linear import Linear
from .workers import Workers

_BLAS_SHARE = 0.8


class WeightCache:
    """Expands `Linear`s within ``budget`` bytes."""

    def __init__(self, budget: int, workers: Workers) -> None:
        self.budget = budget
        self.used = 0
        self.wanted = 0  # by all dense matrices
        self.expansions = 0
        self.hits = 0
        self.evictions = 0
        self.decode_blas = False
        self._workers = workers
        self._pinned: set[int] = set()
        self._left = budget  # for experts
        self._experts: list[Linear] = []  # the expanded ones

    def plan(self, dense: Sequence[Linear], routed: Sequence[Linear], active: float) -> None:
        """Choose among ``dense``; of ``routed`` a token reads the fraction ``active``. What is
        expanded already, by a cache before this one, counts."""
        elements = active * sum(linear.n * linear.k for linear in routed)
        pinned = 0
        self._experts = [linear for linear in routed if linear.expanded is not None]
        self.used = sum(one.expanded_bytes for one in [*dense, *routed] if one.expanded is not None)
        self._left -= sum(linear.expanded_bytes for linear in self._experts)
        for linear in dense:
            elements += linear.n * linear.k
            self.wanted += linear.expanded_bytes
            if linear.expanded_bytes <= self._left:
                self._left -= linear.expanded_bytes
                self._pinned.add(id(linear))
                pinned += linear.n * linear.k
        self.decode_blas = pinned > 0 and pinned >= _BLAS_SHARE * elements

    def ready(self, linear: Linear, rows: int) -> bool:
        """Whether ``rows`` rows should be multiplied with the expanded ``linear``; expands it if
        it is to be kept and is not there yet."""
        if rows == 1 and not self.decode_blas:
            return False
        if linear.expanded is not None:
            self.hits += 1
            return True
        if id(linear) not in self._pinned:
            return False
        self._expand(linear)
        return True

    def expand_all(self, dense: Sequence[Linear]) -> None:
        """Expand those of ``dense`` that are to stay so."""
        for linear in dense:
            if id(linear) in self._pinned and linear.expanded is None:
                self._expand(linear)

    def prepare_expert(self, linear: Linear) -> None:
        """Count a batch's use of an expert, and expand it if it is among the most used."""
        linear.uses += 1
        if linear.expanded is not None:
            self.hits += 1
            return
        size = linear.expanded_bytes
        if size > self._left and self._experts:
            # One use more than the least used is noise; it would let two experts take turns.
            least = min(self._experts, key=lambda expert: expert.uses)
            if least.uses + 1 < linear.uses and size <= self._left + least.expanded_bytes:
                self._drop(least)
        if size <= self._left:
            self._left -= size
            self._expand(linear)
            self._experts.append(linear)

    def _expand(self, linear: Linear) -> None:
        try:
            linear.expanded = linear.expand(self._workers)
        except MemoryError:
            raise OutOfMemory(
                f"expanding a {linear.n} x {linear.k} matrix to float32 needs "
                f"{linear.expanded_bytes / 1e6:.0f} MB that could not be had; try a smaller "
                f"--cpu-cache than {self.budget / 1e6:.0f} MB"
            ) from None
        self.expansions += 1
        self.used += linear.expanded_bytes

    def _drop(self, linear: Linear) -> None:
        self._experts.remove(linear)
        linear.expanded = None
        self.used -= linear.expanded_bytes
        self._left += linear.expanded_bytes
        self.evictions += 1

    def stats(self) -> dict[str, int | bool]:
        return {
            "budget_bytes": self.budget,
            "wanted_bytes": self.wanted,
            "expanded_bytes": self.used,
            "expansions": self.expansions,
            "hits": self.hits,
            "evictions": self.evictions,
            "decode_blas": self.decode_blas,
        }
