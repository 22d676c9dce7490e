"""Which weights lie on a device that cannot hold all of them.

A byte of a dense matrix is worth the same wherever it is: each token reads it once. What differs is
the number of round trips that it takes to use it. A run of whole layers (a segment) takes one, so
layers come first, as one run up to the last one; the head, the largest single matrix, takes one of
its own; what then still fits of the next layer is tried product by product. Of a mixture of experts
a token reads everything but the experts, and few of those: so first all that every token reads,
then single experts, those first that the router picked most often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...config import ModelConfig
from ...native.weights import HEAD_LAYER, Matrix, Proj, wkey
from ..cpu.linear import Place


@dataclass(frozen=True)
class Weight:
    """One matrix of the CPU engine, and its entry in the device's cache."""

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


@dataclass(frozen=True)
class Residency:
    """What lies on the device."""

    segment: range  # layers that run there as a whole
    weights: tuple[Weight, ...]  # those of the segment among them
    count: int  # of all weights

    def __str__(self) -> str:
        layers = f"layers {self.segment.start} to {self.segment.stop - 1}" if self.segment else ""
        words = f"{len(self.weights)} of {self.count} weights"
        return f"{words}, {layers} as a whole" if layers else words

    def first(self, count: int) -> Residency:
        """The same with the first ``count`` weights only, where memory ended there."""
        weights = self.weights[:count]
        left_out = {weight.place.layer for weight in self.weights[count:]}
        start = max((layer + 1 for layer in left_out if layer in self.segment), default=None)
        segment = self.segment if start is None else range(start, self.segment.stop)
        return replace(self, weights=weights, segment=segment)

    def places(self) -> frozenset[Place]:
        return frozenset(weight.place for weight in self.weights)

    def worth(self, min_flop: float) -> frozenset[Place]:
        """Those that the device computes even for one row: in the segment, or above the gate."""
        return frozenset(
            weight.place
            for weight in self.weights
            if weight.place.layer in self.segment or weight.flop >= min_flop
        )


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
    sizes = {matrix: size(matrix) for matrix in {weight.matrix for weight in weights}}
    taken: list[Weight] = []
    left = budget
    first = config.num_hidden_layers
    for unit in _units(config, weights, mode, picks or {}):
        need = sum(sizes[weight.matrix] for weight in unit.weights)
        if need <= left:
            left -= need
            taken += unit.weights
            first = first if unit.layer is None else unit.layer
        elif unit.layer is not None:  # the run of whole layers ends here
            for weight in unit.weights:
                if sizes[weight.matrix] <= left:
                    left -= sizes[weight.matrix]
                    taken.append(weight)
            break
    return Residency(
        segment=range(first, config.num_hidden_layers),
        weights=tuple(taken),
        count=len(weights),
    )


@dataclass(frozen=True)
class _Unit:
    """Weights that go together; a whole layer when ``layer`` is given."""

    weights: Sequence[Weight]
    layer: int | None = None


def _units(
    config: ModelConfig,
    weights: Sequence[Weight],
    mode: str,
    picks: Mapping[tuple[int, int], int],
) -> Iterator[_Unit]:
    """In the order in which they are wanted."""
    head = [weight for weight in weights if weight.place.kind == "head"]
    yield _Unit(head)
    layers: list[list[Weight]] = [[] for _ in range(config.num_hidden_layers)]
    experts: list[Weight] = []
    for weight in weights:
        if weight.place.expert >= 0:
            experts.append(weight)
        elif weight.place.layer >= 0:
            layers[weight.place.layer].append(weight)
    for i in reversed(range(config.num_hidden_layers)):
        if mode == "segments" and not any(config.layer_is_moe):
            yield _Unit(_largest_first(layers[i]), i)
        else:
            for weight in _largest_first(layers[i]):
                yield _Unit([weight])
    pairs: dict[tuple[int, int], list[Weight]] = {}
    for weight in experts:
        pairs.setdefault((weight.place.layer, weight.place.expert), []).append(weight)
    # Equal counts go layer by layer in turns: each layer gets its share.
    order = sorted(pairs, key=lambda at: (-picks.get(at, 0), at[1], at[0]))
    for at in order:
        yield _Unit(pairs[at])


def _largest_first(weights: Sequence[Weight]) -> list[Weight]:
    return sorted(weights, key=lambda weight: -weight.flop)
