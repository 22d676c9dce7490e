"""Which weights go to a device of which size."""

from __future__ import annotations

from typing import Any

import pytest
from cpu_models import make_config
from hypothesis import given
from hypothesis import strategies as st

from pykestrel.engine.offload import choose, weights_of
from pykestrel.native import Matrix

MODES = ("segments", "projections")
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"num_hidden_layers": 5},
    "tied": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "experts": {
        "num_hidden_layers": 3,
        "layer_is_moe": (True,) * 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


def size(matrix: Matrix) -> int:
    return matrix.stack * (matrix.n + 16 - matrix.n % 16) * matrix.k


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
    total = sum(size(weight.matrix) for weight in weights)
    budget = int(share * total)
    picks = {}
    if config.num_experts:
        expert = st.tuples(st.integers(0, 2), st.integers(0, 5))
        picks = data.draw(st.dictionaries(expert, st.integers(0, 1000)))
    found = choose(config, weights, budget, size, mode=mode, picks=picks)
    assert sum(size(weight.matrix) for weight in found.weights) <= budget
    assert len(found.places()) == len(found.weights)
    assert found.count == len(weights)
    if share >= 1:
        assert len(found.weights) == len(weights)
    # a segment's layers are there, all of each, up to the last one
    for layer in found.segment:
        assert sum(place.layer == layer for place in found.places()) == 4
    assert not found.segment or found.segment.stop == config.num_hidden_layers
    assert not (found.segment and (mode == "projections" or config.num_experts))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_larger_budget_holds_no_less(shape: str, mode: str) -> None:
    config = make_config(**SHAPES[shape])
    weights = weights_of(config, "q4")
    total = sum(size(weight.matrix) for weight in weights)
    held = []
    for percent in range(0, 101, 5):
        found = choose(config, weights, total * percent // 100, size, mode=mode)
        held.append(sum(size(weight.matrix) for weight in found.weights))
    largest = max(size(weight.matrix) for weight in weights)
    for percent, nbytes in zip(range(0, 101, 5), held, strict=True):
        assert nbytes > total * percent / 100 - largest
    assert held[-1] == total


def test_experts_that_are_picked_most_come_first() -> None:
    config = make_config(**SHAPES["experts"])
    weights = weights_of(config, "q8")
    picks = {(1, 4): 100, (0, 2): 50, (2, 2): 1}
    routed = [weight for weight in weights if weight.place.expert >= 0]
    others = sum(size(weight.matrix) for weight in weights if weight.place.expert < 0)
    pair = sum(size(weight.matrix) for weight in routed) // 18
    for count in range(4):
        found = choose(config, weights, others + count * pair, size, picks=picks)
        experts = {(p.layer, p.expert) for p in found.places() if p.expert >= 0}
        assert experts == set(sorted(picks, key=lambda at: -picks[at])[:count])


def test_the_first_weights_of_a_plan_are_a_plan() -> None:
    """Where memory ends in the middle."""
    config = make_config(**SHAPES["dense"])
    weights = weights_of(config, "q8")
    whole = choose(config, weights, 1 << 40, size)
    for count in range(len(whole.weights) + 1):
        part = whole.first(count)
        assert part.weights == whole.weights[:count]
        for layer in range(config.num_hidden_layers):
            complete = sum(place.layer == layer for place in part.places()) == 4
            assert (layer in part.segment) == complete
