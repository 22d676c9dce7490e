"""Which weights lie on a device that cannot hold all of them.

A byte of a dense matrix is worth the same wherever it is: each token reads it once. What differs is
the number of round trips that it takes to use it. A run of whole layers (a segment) takes one, so
layers come first, as one run up to the last one; the head, the largest single matrix, takes one of
its own; what then still fits of the next layer is tried product by product.

Of a mixture of experts a token reads everything but the experts, and few of those: so first all
that every token reads, of every layer. Then layers become whole, from the last one on: a layer's
experts are stacks there, as the decoder reads them, and its router comes with them. What is left is
for single experts of the other layers, those first that the router picked most often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from ...config import ModelConfig
from ...native.weights import HEAD_LAYER, Matrix, Proj, wkey
from ..cpu.linear import Place
from ..cuda.plan import Entry, entries


@dataclass(frozen=True)
class Weight:
    """One matrix of the CPU engine that is an entry of the device's cache."""

    place: Place
    matrix: Matrix  # a stack of 2 for gate and up
    layer: int
    proj: int

    @property
    def key(self) -> int:
        return wkey(self.layer, self.proj)

    @property
    def flop(self) -> int:
        """Of one row."""
        return 2 * self.matrix.rows * self.matrix.k

    @property
    def places(self) -> tuple[Place, ...]:
        return (self.place,)

    @property
    def entries(self) -> tuple[Weight, ...]:
        return (self,)


@dataclass(frozen=True)
class Stacks:
    """All experts of a layer and their router, as the decoder reads them. No product finds a single
    expert in them: they are for a segment."""

    layer: int
    entries: tuple[Entry, ...]  # ROUTER [E, H]; stacks of E: GATE and UP [F, H], DOWN [H, F]
    places: tuple[Place, ...]  # of the experts, two each


Part: TypeAlias = "Weight | Stacks"  # what goes to the device all or not at all


def weights_of(config: ModelConfig, quant: str) -> list[Weight]:
    """Every matrix of a model but an embedding that is not its head, in the order a token reads
    them."""
    c, h = config, config.hidden_size
    found: list[Weight] = []

    def add(kind: str, layer: int, proj: int, stack: int, n: int, k: int, expert: int = -1) -> None:
        place = Place(kind, layer, expert)
        where = HEAD_LAYER if layer < 0 else layer
        found.append(Weight(place, Matrix(quant, stack, n, k), where, proj))

    for i, moe in enumerate(c.layer_is_moe):
        add("qkv", i, Proj.FUSED_QKV, 1, c.q_dim + 2 * c.kv_dim, h)
        add("o", i, Proj.O, 1, h, c.q_dim)
        if moe:
            f = c.moe_intermediate_size
            for e in range(c.num_experts):
                add("expert_gate_up", i, Proj.EXPERT_GU + e, 2, f, h, e)
                add("expert_down", i, Proj.EXPERT_DOWN + e, 1, h, f, e)
        else:
            f = c.intermediate_size
            add("gate_up", i, Proj.FUSED_GU, 2, f, h)
            add("down", i, Proj.DOWN, 1, h, f)
    add("head", -1, Proj.EMBED if c.tie_word_embeddings else Proj.HEAD, 1, c.vocab_size, h)
    return found


def stacks_of(config: ModelConfig, quant: str) -> dict[int, Stacks]:
    """Of every layer with experts."""
    found: dict[int, list[Entry]] = {i: [] for i, moe in enumerate(config.layer_is_moe) if moe}
    for entry in entries(config, quant):
        if entry.layer in found and entry.proj not in (Proj.FUSED_QKV, Proj.O):
            found[entry.layer].append(entry)
    kinds = ("expert_gate_up", "expert_down")
    which = [(kind, e) for e in range(config.num_experts) for kind in kinds]
    return {
        layer: Stacks(layer, tuple(of), tuple(Place(kind, layer, e) for kind, e in which))
        for layer, of in found.items()
    }


@dataclass(frozen=True)
class Residency:
    """What lies on the device."""

    segment: range  # layers that run there as a whole
    parts: tuple[Part, ...]  # those of the segment among them, in the order of their upload
    count: int  # of all weights

    def __str__(self) -> str:
        layers = f"layers {self.segment.start} to {self.segment.stop - 1}" if self.segment else ""
        words = f"{len(self.places())} of {self.count} weights"
        return f"{words}, {layers} as a whole" if layers else words

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Those that a product finds."""
        return tuple(part for part in self.parts if isinstance(part, Weight))

    @property
    def stacks(self) -> tuple[Stacks, ...]:
        return tuple(part for part in self.parts if isinstance(part, Stacks))

    def places(self) -> frozenset[Place]:
        """Of all matrices, those in stacks among them."""
        return frozenset(place for part in self.parts for place in part.places)

    def first(self, count: int) -> Residency:
        """The same with the first ``count`` parts only, where memory ended there."""
        left_out = {part.layer for part in self.parts[count:]}
        start = max((layer + 1 for layer in left_out if layer in self.segment), default=None)
        segment = self.segment if start is None else range(start, self.segment.stop)
        return replace(self, parts=self.parts[:count], segment=segment)

    def without_segment(self) -> Residency:
        """What products find of it, where layers do not run as a whole after all."""
        return replace(self, parts=self.weights, segment=range(0))

    def worth(self, min_flop: float, experts: int = 1) -> frozenset[Place]:
        """Those that the device computes even for one row: in the segment, or above the gate.
        experts: so many of a token are weighed together, if all of them are there."""
        return self.places() - {
            weight.place
            for weight in self.weights
            if weight.layer not in self.segment
            and weight.flop * (experts if weight.place.expert >= 0 else 1) < min_flop
        }


def choose(
    config: ModelConfig,
    weights: Sequence[Weight],
    budget: int,
    size: Callable[[Matrix], int],
    *,
    mode: str = "segments",
    picks: Mapping[tuple[int, int], int] | None = None,
) -> Residency:
    """The weights for ``budget`` bytes. size: device bytes of a matrix. picks: how often the router
    picked (layer, expert); experts that are not there count 0."""
    layers: list[list[Weight]] = [[] for _ in range(config.num_hidden_layers)]
    pairs: dict[tuple[int, int], list[Weight]] = {}
    room = _Room(budget, size)
    for weight in weights:
        if weight.place.expert >= 0:
            pairs.setdefault((weight.place.layer, weight.place.expert), []).append(weight)
        elif weight.place.layer >= 0:
            layers[weight.place.layer].append(weight)
        else:
            room.take([weight])
    for layer in layers:
        layer.sort(key=lambda weight: -weight.flop)
    if pairs or mode == "projections":
        for layer in reversed(layers):
            room.take_each(layer)
    first = len(layers)
    if mode == "segments":
        first = _whole_layers(room, layers, stacks_of(config, weights[0].matrix.kind))
    # Equal counts go layer by layer in turns: each layer gets its share.
    for at in sorted(pairs, key=lambda at: (-(picks or {}).get(at, 0), at[1], at[0])):
        if at[0] < first:
            room.take(pairs[at])
    return Residency(range(first, len(layers)), tuple(room.parts), len(weights))


class _Room:
    """A budget, and what it is spent on."""

    def __init__(self, budget: int, size: Callable[[Matrix], int]) -> None:
        self.parts: list[Part] = []
        self._left = budget
        self._size = cache(size)

    def take(self, parts: Sequence[Part]) -> bool:
        """All of them, or none where they do not fit."""
        need = sum(self._size(entry.matrix) for part in parts for entry in part.entries)
        if need > self._left:
            return False
        self._left -= need
        self.parts += parts
        return True

    def take_each(self, parts: Sequence[Part]) -> None:
        """Those that fit."""
        for part in parts:
            self.take([part])


def _whole_layers(
    room: _Room, layers: Sequence[Sequence[Weight]], stacks: Mapping[int, Stacks]
) -> int:
    """Take what layers lack, from the last one on, while it fits. The first layer of the run."""
    taken = frozenset(room.parts)
    for i in reversed(range(len(layers))):
        missing = [weight for weight in layers[i] if weight not in taken]
        if not room.take([*missing, *([stacks[i]] if i in stacks else [])]):
            room.take_each(missing)
            return i + 1
    return 0
