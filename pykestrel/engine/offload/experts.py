"""Which experts lie on the device: those that the router picks most often.

The counts are kept while a model lives, old picks counting less. Now and then the experts that were
picked clearly more often change places with those on the device that were picked least. Few do at a
time, and each exchange must pay for its upload, so that experts do not take turns under a small
budget.

Those of a segment's layers lie in stacks and stay there. When the segment is refused nothing reads
the stacks any more: they leave, and what they took is room for single experts.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from ... import native
from ...errors import NativeError
from ...native import Handle
from ..cpu.linear import Linear, Place
from ..cpu.offload import Job
from .plan import Residency, Stacks, Weight

if TYPE_CHECKING:
    from .device import Device

Expert: TypeAlias = "tuple[int, int]"  # layer, number
Upload: TypeAlias = Callable[[Handle, Weight, Linear], None]

_EVERY: Final = 64  # tokens between two looks at the counts
_MOST: Final = 16  # experts that change places at a time
_CLEARLY: Final = 1.5  # times as many picks, and
_MORE: Final = 16  # so many more, are worth an upload
_HALVE: Final = 32  # looks after which a pick counts half: a text ends, another begins
_THRASH: Final = 0.1  # evictions a token, at _LOOKS looks one after another: worth a warning
_LOOKS: Final = 4


class Experts:
    """Counts picks and exchanges experts on ``handle``.

    weights: both matrices of every expert; linears: the CPU's; resident: the experts on the device,
    each on its own; stacks: the others that are there.
    """

    def __init__(
        self,
        handle: Handle,
        weights: Mapping[Expert, Sequence[Weight]],
        linears: Mapping[Place, Linear],
        resident: Iterable[Expert],
        upload: Upload,
        stacks: Iterable[Stacks] = (),
    ) -> None:
        self.picks: Counter[Expert] = Counter()
        self.evictions = 0
        self._handle = handle
        self._weights = weights
        self._linears = linears
        self._resident = set(resident)
        self._stacks = list(stacks)
        # Places that nobody has come to, and what may be left there of whom: None is nothing.
        self._vacant: list[Expert | None] = []
        self._upload = upload
        self._tokens = 0  # since the last look
        self._looks = 0
        self._busy: list[tuple[int, int]] = []  # (evictions, tokens) of the last looks
        self._warned = False

    @classmethod
    def of(
        cls,
        handle: Handle,
        weights: Iterable[Weight],
        residency: Residency,
        linears: Mapping[Place, Linear],
        upload: Upload,
    ) -> Experts | None:
        """None for a model without experts; ``weights`` are all of its weights."""
        pairs: dict[Expert, list[Weight]] = {}
        for weight in weights:
            if weight.place.expert >= 0:
                pairs.setdefault((weight.place.layer, weight.place.expert), []).append(weight)
        there = {weight.place for weight in residency.weights}
        resident = [
            expert for expert, pair in pairs.items() if all(one.place in there for one in pair)
        ]
        if not pairs:
            return None
        return cls(handle, pairs, linears, resident, upload, residency.stacks)

    @property
    def resident(self) -> frozenset[Expert]:
        """Those on the device, each on its own."""
        return frozenset(self._resident)

    @property
    def stacked(self) -> frozenset[Expert]:
        """Those on the device in stacks."""
        places = (place for stacks in self._stacks for place in stacks.places)
        return frozenset((place.layer, place.expert) for place in places)

    @property
    def outside(self) -> frozenset[Expert]:
        """Those that are not there."""
        return frozenset(self._weights) - self.resident - self.stacked

    def count(self, jobs: Iterable[Job]) -> None:
        """Jobs of gate and up: one for each expert that some rows were routed to."""
        for job in jobs:
            place = job.linear.place
            self.picks[place.layer, place.expert] += job.rows

    def after(self, tokens: int, device: Device) -> None:
        """Tokens have been seen: exchange experts if it is time and worth it."""
        if not device.segment:
            self.unstack()
        self._tokens += tokens
        if self._tokens < _EVERY or not (self._resident or self._vacant):
            return
        tokens, self._tokens = self._tokens, 0
        before = self.evictions
        for coming, going in self.worth_exchanging():
            if not self._exchange(coming, going, device):
                break
            self.evictions += going is not None
        self._watch(self.evictions - before, tokens)
        self._looks += 1
        if self._looks % _HALVE == 0:
            self.picks = Counter({expert: n // 2 for expert, n in self.picks.items() if n > 1})

    def _watch(self, evictions: int, tokens: int) -> None:
        """Say once that experts keep taking turns."""
        self._busy = [*self._busy[1 - _LOOKS :], (evictions, tokens)]
        thrashing = [gone >= _THRASH * seen for gone, seen in self._busy]
        if self._warned or len(thrashing) < _LOOKS or not all(thrashing):
            return
        self._warned = True
        gone, seen = (sum(of) for of in zip(*self._busy, strict=True))
        warnings.warn(
            f"{gone} experts had to leave the GPU in the last {seen} tokens "
            f"({gone / seen:.2f} a token): --vram-budget is too small for this text; a larger one, "
            "or --quant q4, keeps them there",
            stacklevel=5,
        )

    def worth_exchanging(self) -> list[tuple[Expert, Expert | None]]:
        """(coming, going), the clearest first; going None: to a vacant place."""
        away = self.outside
        outside = [expert for expert in self.picks if expert in away]
        outside.sort(key=lambda expert: -self.picks[expert])
        pairs: list[tuple[Expert, Expert | None]] = []
        pairs += [(coming, None) for coming in outside[: min(_MOST, len(self._vacant))]]
        inside = sorted(self._resident, key=lambda expert: self.picks[expert])
        for coming, going in zip(outside[len(pairs) : _MOST], inside, strict=False):
            few, many = self.picks[going], self.picks[coming]
            if many < few * _CLEARLY or many < few + _MORE:
                break
            pairs.append((coming, going))
        return pairs

    def _exchange(self, coming: Expert, going: Expert | None, device: Device) -> bool:
        """What fails or is interrupted leaves a vacant place, which the next look fills."""
        if going is not None:
            device.forget(self._weights[going])
            self._vacant.append(going)
            self._resident.discard(going)
        if (left := self._vacant[-1]) is not None:
            self._drop(left)
        device.forget(self._weights[coming])  # half of it may be there, from a load without room
        try:
            for weight in self._weights[coming]:
                self._upload(self._handle, weight, self._linears[weight.place])
        except BaseException as error:
            self._drop(coming)
            if not isinstance(error, NativeError):
                raise
            device.refuse(error)
            return False
        self._vacant.pop()
        self._resident.add(coming)
        device.learn(self._weights[coming])
        return True

    def unstack(self) -> None:
        """Nothing reads the stacks any more: as many places for single experts as their memory is
        enough for."""
        if not self._stacks:
            return
        freed = 0
        for entry in (entry for stacks in self._stacks for entry in stacks.entries):
            freed += native.cache_size(entry.matrix)
            self._drop_entry(entry.key)
        pair = sum(native.cache_size(w.matrix) for w in next(iter(self._weights.values())))
        self._stacks = []
        self._vacant[:0] = [None] * (freed // pair)

    def _drop(self, expert: Expert) -> None:
        """What of it lies on the device, if anything does."""
        for weight in self._weights[expert]:
            self._drop_entry(weight.key)

    def _drop_entry(self, key: int) -> None:
        with suppress(NativeError):
            native.cache_drop(self._handle, key)
