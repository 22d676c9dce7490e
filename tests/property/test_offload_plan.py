"""Which weights go to a device of which size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from cpu_models import make_config
from hypothesis import given
from hypothesis import strategies as st

from pykestrel.config import ModelConfig
from pykestrel.engine.offload import Part, Residency, choose, weights_of
from pykestrel.native import Matrix, Proj

MODES = ("segments", "projections")
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_is_moe": (True,) * 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"num_hidden_layers": 5},
    "tied": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "experts": EXPERTS,
    "experts last": EXPERTS | {"layer_is_moe": (False, True, True)},
    "experts first": EXPERTS | {"layer_is_moe": (True, True, False)},
    "experts between": EXPERTS | {"layer_is_moe": (True, False, True)},
}


def size(matrix: Matrix) -> int:
    """Float32 is 4 bytes, rows are padded, and an entry costs a little."""
    each = 4 if matrix.kind == "f32" else 1
    return each * matrix.stack * (matrix.n + 16 - matrix.n % 16) * matrix.k + 20


def held(parts: Sequence[Part]) -> int:
    return sum(size(entry.matrix) for part in parts for entry in part.entries)


def router(config: ModelConfig) -> int:
    return size(Matrix("f32", 1, config.num_experts, config.hidden_size))


def stacks(config: ModelConfig) -> int:
    """Bytes of a layer's experts as a segment has them, router included."""
    e, f, h = config.num_experts, config.moe_intermediate_size, config.hidden_size
    return router(config) + 2 * size(Matrix("q8", e, f, h)) + size(Matrix("q8", e, h, f))


def everything(config: ModelConfig, mode: str) -> int:
    """Bytes that hold the model."""
    weights = weights_of(config, "q8")
    if mode == "projections":
        return held(weights)
    others = [weight for weight in weights if weight.place.expert < 0]
    return held(others) + sum(config.layer_is_moe) * stacks(config)


def is_whole(found: Residency, config: ModelConfig, layer: int) -> bool:
    """As a segment needs it: a dense layer's 4 weights, or qkv, o and all experts as stacks."""
    there = [place for place in found.places() if place.layer == layer]
    if not config.layer_is_moe[layer]:
        return len(there) == 4
    stacked = [part.layer for part in found.stacks]
    return len(there) == 2 + 2 * config.num_experts and stacked.count(layer) == 1


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    mode=st.sampled_from(MODES),
    share=st.floats(0, 1.2),
    data=st.data(),
)
def test_what_is_chosen_fits_and_each_weight_once(
    shape: str, mode: str, share: float, data: st.DataObject
) -> None:
    config = make_config(**SHAPES[shape])
    weights = weights_of(config, "q8")
    budget = int(share * everything(config, mode))
    picks = {}
    if config.num_experts:
        expert = st.tuples(st.integers(0, 2), st.integers(0, 5))
        picks = data.draw(st.dictionaries(expert, st.integers(0, 1000)))
    found = choose(config, weights, budget, size, mode=mode, picks=picks)
    assert held(found.parts) <= budget
    assert sum(len(part.places) for part in found.parts) == len(found.places())
    assert found.places() <= {weight.place for weight in weights}
    assert found.count == len(weights)
    assert str(found).startswith(f"{len(found.places())} of {len(weights)} weights")
    if share >= 1:
        assert len(found.places()) == len(weights)
        assert len(found.segment) == (config.num_hidden_layers if mode == "segments" else 0)
    # a segment's layers are there, all of each, up to the last one; stacks are for nothing else
    assert found.segment.stop == config.num_hidden_layers
    assert all(is_whole(found, config, layer) for layer in found.segment)
    assert {part.layer for part in found.stacks} <= set(found.segment)
    for part in found.stacks:
        kinds = [Proj.ROUTER, Proj.GATE, Proj.UP, Proj.DOWN]
        assert [entry.proj for entry in part.entries] == kinds
    if mode == "projections":
        assert not found.segment


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_larger_budget_holds_no_less(shape: str, mode: str) -> None:
    """But for what is less than one step: a matrix, both of an expert, or a router."""
    config = make_config(**SHAPES[shape])
    weights = weights_of(config, "q8")
    total = everything(config, mode)
    step = max(size(weight.matrix) for weight in weights)
    if config.num_experts:
        pair = [weight for weight in weights if weight.place.expert == 0][:2]
        step = max(step, held(pair), router(config) + 20 * 2 * config.num_experts)
    layers = 0
    for percent in range(0, 101, 5):
        found = choose(config, weights, total * percent // 100, size, mode=mode)
        assert held(found.parts) > total * percent / 100 - step
        assert len(found.segment) >= layers
        layers = len(found.segment)
    assert held(found.parts) == total


@pytest.mark.parametrize("shape", ["experts", "experts last", "experts between"])
def test_a_layer_with_experts_is_wanted_as_a_whole(shape: str) -> None:
    """After what every token reads; a byte less is for single experts. The router counts."""
    config = make_config(**SHAPES[shape])
    weights = weights_of(config, "q8")
    last = config.num_hidden_layers - 1
    others = {weight.place for weight in weights if weight.place.expert < 0}
    enough = held([w for w in weights if w.place in others]) + stacks(config)
    found = choose(config, weights, enough, size)
    assert held(found.parts) == enough
    assert [part.layer for part in found.stacks] == [last]
    assert set(found.segment) >= {last}
    assert found.places() > others
    found = choose(config, weights, enough - 1, size)
    assert (found.stacks, len(found.segment)) == ((), 0)
    assert found.places() > others
    assert {place.layer for place in found.places() if place.expert >= 0} == {
        layer for layer, moe in enumerate(config.layer_is_moe) if moe
    }


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_experts_that_are_picked_most_come_first(whole: int) -> None:
    """Of the layers that are not there as a whole."""
    config = make_config(**SHAPES["experts"])
    weights = weights_of(config, "q8")
    picks = {(1, 4): 100, (0, 2): 50, (2, 2): 10, (0, 5): 1}
    others = held([weight for weight in weights if weight.place.expert < 0])
    pair = held([weight for weight in weights if weight.place.expert == 0][:2])
    wanted = [at for at in sorted(picks, key=lambda at: -picks[at]) if at[0] < 3 - whole]
    for count in range(len(wanted) + 1):
        budget = others + whole * stacks(config) + count * pair
        found = choose(config, weights, budget, size, picks=picks)
        assert len(found.segment) == whole
        experts = {(w.place.layer, w.place.expert) for w in found.weights if w.place.expert >= 0}
        assert experts == set(wanted[:count])


@pytest.mark.parametrize("share", [0.75, 1])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_first_parts_of_a_plan_are_a_plan(shape: str, share: float) -> None:
    """Where memory ends in the middle."""
    config = make_config(**SHAPES[shape])
    weights = weights_of(config, "q8")
    plan = choose(config, weights, int(share * everything(config, "segments")), size)
    assert plan.segment
    for count in range(len(plan.parts) + 1):
        part = plan.first(count)
        assert part.parts == plan.parts[:count]
        assert part.count == len(weights)
        last = config.num_hidden_layers
        start = last
        while start > 0 and is_whole(part, config, start - 1):
            start -= 1
        assert part.segment == range(start, last)
