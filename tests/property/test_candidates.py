"""Sampling from the largest logits alone gives what sampling from all of them gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pykestrel.engine import Answer, Candidates, Picked, Want
from pykestrel.sampling import CANDIDATES, MAX_CANDIDATES, Sampler, SamplingParams

F32 = NDArray[np.float32]


def device(logits: F32, want: Want, error: float = 0.0) -> Answer:
    """What a device answers; its sum is off by ``error``, relatively."""
    x = logits[: want.vocab_limit]
    if not want.top:
        return Picked(int(x.argmax()))
    order = np.argsort(-x, kind="stable")[: want.top]  # equal ones by rising id
    with np.errstate(under="ignore"):
        total = np.exp((x - x.max()) / np.float32(want.temperature), dtype=np.float32).sum()
    return Candidates(order.astype(np.int32), x[order], float(total) * (1 + error))


class Full:
    """The full logits, and how often they were asked for."""

    def __init__(self, logits: F32) -> None:
        self.logits = logits
        self.fetched = 0

    def __call__(self) -> F32:
        self.fetched += 1
        return self.logits


def both(
    params: SamplingParams, rows: list[F32], limit: int, error: float = 0.0
) -> tuple[list[int], list[int], int]:
    """Ids from the candidates, ids from all logits, and how often the first fetched all."""
    ours, plain = Sampler(params, limit), Sampler(params, limit)
    got, expected, fetched = [], [], 0
    for logits in rows:
        full = Full(logits)
        want = ours.want()
        answer = logits if want is None else device(logits, want, error)
        got.append(ours.choose(answer, full).id)
        expected.append(plain.sample(logits).id)
        ours.accept(got[-1])
        plain.accept(expected[-1])
        fetched += full.fetched
    return got, expected, fetched


def make_logits(seed: int, size: int, spread: float, step: float) -> F32:
    """Random logits; with ``step`` rounded to its multiples, so that many tie."""
    x = np.random.default_rng(seed).standard_normal(size) * spread
    if step:
        x = np.round(x / step) * step
    return x.astype(np.float32)


settings_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.05, 0.6, 0.7, 1.0, 1.7, 30.0]),
    top_k=st.sampled_from([0, 1, 2, 20, 40, 255, 256, 300, 511, 512, 1023, 1024, 5000]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.8, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)


@given(
    params=settings_of,
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 7, 255, 256, 257, 900, 3000, 9000]),
    masked=st.sampled_from([0, 0, 1, 100]),
    spread=st.sampled_from([0.01, 1.0, 4.0, 12.0]),
    step=st.sampled_from([0.0, 0.0, 0.5, 4.0]),
    error=st.sampled_from([0.0, 1e-5, -1e-5]),
)
def test_candidates_give_what_all_logits_give(
    params: SamplingParams,
    seed: int,
    size: int,
    masked: int,
    spread: float,
    step: float,
    error: float,
) -> None:
    rows = [make_logits(seed + i, size, spread, step) for i in range(4)]
    limit = max(1, size - masked)
    got, expected, _ = both(params, rows, limit, error)
    assert got == expected


@pytest.mark.parametrize("spread", [3.0, 6.0])
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.7, "min_p": 0.05},
        {"top_k": 40},
    ],
)
def test_the_usual_settings_need_no_full_logits(values: dict[str, Any], spread: float) -> None:
    rows = [make_logits(i, 30_000, spread, 0.0) for i in range(20)]
    got, expected, fetched = both(SamplingParams(seed=1, **values), rows, 30_000)
    assert got == expected
    assert fetched == 0


def test_a_nucleus_within_the_candidates_is_proven() -> None:
    rows = [make_logits(i, 30_000, 8.0, 0.0) for i in range(20)]
    got, expected, fetched = both(SamplingParams(seed=1, temperature=0.7, top_p=0.9), rows, 30_000)
    assert got == expected
    assert fetched == 0


def test_a_wide_nucleus_and_ties_at_the_end_take_all_logits() -> None:
    flat = [make_logits(i, 3000, 0.01, 0.0) for i in range(3)]
    got, expected, fetched = both(SamplingParams(seed=1, top_p=0.9), flat, 3000)
    assert (got, fetched) == (expected, 3)
    tied = [np.zeros(3000, np.float32)] * 3
    got, expected, fetched = both(SamplingParams(seed=1, top_k=20), tied, 3000)
    assert (got, fetched) == (expected, 3)


@pytest.mark.parametrize(
    ("values", "top"),
    [
        ({"temperature": 0}, 0),
        ({"top_k": 20}, CANDIDATES),
        ({"top_k": 400}, 800),
        ({"top_k": 1000}, MAX_CANDIDATES),
        ({"top_p": 0.9}, CANDIDATES),
        ({"min_p": 0.1}, CANDIDATES),
    ],
)
def test_what_is_asked_for(values: dict[str, Any], top: int) -> None:
    want = Sampler(SamplingParams(**values), 5000).want()
    assert want == Want(5000, top, 0.7 if top else 1.0)


@pytest.mark.parametrize(
    "values",
    [
        {},  # the temperature alone: every token can come
        {"top_k": 1024},
        {"temperature": 0, "logprobs": True},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0, "presence_penalty": 0.5},
        {"temperature": 0, "frequency_penalty": 0.5},
        {"temperature": 0, "logit_bias": {3: 1.0}},
    ],
)
def test_what_needs_all_logits(values: dict[str, Any]) -> None:
    assert Sampler(SamplingParams(**values), 5000).want() is None


def test_held_off_stop_ids_need_all_logits_until_they_are_free() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(3,))
    sampler = Sampler(params, 5000)
    for _ in range(2):
        assert sampler.want() is None
        sampler.accept(1)
    assert sampler.want() == Want(5000)
