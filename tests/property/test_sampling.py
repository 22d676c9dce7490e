"""The sampler against a plain float64 reference, and what must hold for any logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pykestrel.errors import ModelError, NumericsError, UsageError
from pykestrel.filters import nucleus, pick
from pykestrel.sampling import (
    BUILT_IN,
    NOT_THINKING,
    THINKING,
    Sampled,
    Sampler,
    SamplingParams,
    defaults,
)

# Halves and quarters: sums and differences are exact in float32, so that both sides see the same
# ties, and ties there are.
logit = st.integers(-40, 40).map(lambda n: n / 4)
logits_of = st.lists(logit, min_size=1, max_size=24)


def reference(x: list[float], p: SamplingParams) -> NDArray[np.float64]:
    """Probabilities by the definitions of Hugging Face's warpers, in float64, one at a time."""
    z = np.array(x, dtype=np.float64) / p.temperature
    n = z.size
    if 0 < p.top_k < n:  # TopKLogitsWarper: below the k-th largest goes
        z[z < np.sort(z)[-p.top_k]] = -np.inf
    if p.top_p < 1:  # TopPLogitsWarper, ties by id: goes when the likelier ones hold top_p already
        probs = softmax(z)
        before = 0.0
        for i in sorted(range(n), key=lambda i: (-probs[i], i)):
            if before > 0 and before >= p.top_p:
                z[i] = -np.inf
            before += probs[i]
        # top_p = 0 keeps the first one, as any other small value
        if p.top_p == 0:
            z[[i for i in range(n) if i != int(np.argmax(x))]] = -np.inf
    if p.min_p > 0:  # MinPLogitsWarper
        probs = softmax(z)
        z[probs < p.min_p * probs.max()] = -np.inf
    return softmax(z)


def softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(z - z.max())
    return e / e.sum()  # type: ignore[no-any-return]


class Scripted:
    """A generator that draws what it is told to."""

    def __init__(self, u: float) -> None:
        self.u = u

    def random(self) -> float:
        return self.u


def drawn(sampler: Sampler, logits: NDArray[Any], u: float) -> int:
    sampler._rng = Scripted(u)  # type: ignore[assignment]
    return sampler.sample(logits).id


def distribution(x: list[float], params: SamplingParams, steps: int = 2000) -> NDArray[np.float64]:
    """Measure the share of every id by sweeping the random number over [0, 1)."""
    sampler = Sampler(params, len(x))
    logits = np.array(x, dtype=np.float32)
    picks = [drawn(sampler, logits, (n + 0.5) / steps) for n in range(steps)]
    return np.bincount(picks, minlength=len(x)) / steps


params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.37, 0.5, 0.83, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.21, 0.7, 1.0]),
)


def near_an_edge(x: list[float], p: SamplingParams) -> bool:
    """Whether float32 may decide a filter otherwise: a mass or ratio within 1e-5 of its limit."""
    z = np.array(x, dtype=np.float64) / p.temperature
    if 0 < p.top_k < z.size:
        z = z[z >= np.sort(z)[-p.top_k]]
    probs = np.sort(softmax(z))[::-1]
    masses = np.concatenate([[0.0], np.cumsum(probs)])
    close = bool(np.any(np.abs(masses[1:-1] - p.top_p) < 1e-5))
    ratios = probs / probs[0]
    return close or bool(np.any(np.abs(ratios - p.min_p) < 1e-5 * p.min_p))


@given(x=logits_of, params=params_of)
def test_filters_are_the_references(x: list[float], params: SamplingParams) -> None:
    assume(not near_an_edge(x, params))
    expected = reference(x, params)
    got = distribution(x, params, steps=400)
    assert np.all(got[expected == 0] == 0)
    assert np.all(np.abs(got - expected) <= 1.01 / 400)


@given(
    x=logits_of,
    temperature=st.sampled_from([1e-5, 1e-4, 1.0, 1e6, 1e300]),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 1.0]),
    top_k=st.sampled_from([0, 1, 1000]),
    u=st.floats(0, 1, exclude_max=True),
    masked=st.lists(st.booleans(), max_size=24),
)
@example(x=[3.0, 3.0], temperature=1e-5, top_p=1e-9, min_p=1.0, top_k=0, u=1 - 2**-53, masked=[])
def test_a_possible_candidate_always_survives(
    x: list[float],
    temperature: float,
    top_p: float,
    min_p: float,
    top_k: int,
    u: float,
    masked: list[bool],
) -> None:
    """Extreme settings and masks never give NaN, a masked id or one of no probability."""
    logits = np.array(x, dtype=np.float32)
    hide = np.array(masked[: logits.size] + [False] * (logits.size - len(masked)), dtype=bool)
    if hide.all():
        hide[0] = False
    logits[hide] = -np.inf
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    with np.errstate(all="raise", under="ignore"):
        chosen = drawn(Sampler(params, logits.size), logits, u)
    assert not hide[chosen]
    # (at 1e6 and above all candidates weigh the same in float32)
    if temperature <= 1 and (temperature <= 1e-5 or top_p <= 1e-9 or min_p == 1 or top_k == 1):
        assert logits[chosen] == logits.max()


@given(x=logits_of, temperature=st.sampled_from([0, 1e-8, 9.9e-6]))
def test_greedy_is_argmax_lowest_id_first(x: list[float], temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), len(x))
    assert sampler.sample(np.array(x, dtype=np.float32)) == Sampled(x.index(max(x)))


@given(x=logits_of, limit=st.integers(1, 24), temperature=st.sampled_from([0.0, 1.0]))
def test_ids_at_and_above_the_limit_are_never_chosen(
    x: list[float], limit: int, temperature: float
) -> None:
    limit = min(limit, len(x))
    logits = np.array(x, dtype=np.float32)
    logits[limit:] = 100
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0, top_logprobs=20), limit)
    for _ in range(5):
        got = sampler.sample(logits)
        assert got.id < limit
        assert all(id < limit for id, _ in got.top_logprobs or ())


@given(
    x=logits_of,
    prompt=st.lists(st.integers(0, 30), max_size=8),
    said=st.lists(st.integers(0, 23), max_size=12),
    repetition=st.sampled_from([1.0, 0.5, 2.0]),
    presence=st.sampled_from([0.0, 0.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.0]),
    bias=st.dictionaries(st.integers(0, 23), st.sampled_from([-100, -0.5, 0.25, 100]), max_size=4),
    min_tokens=st.integers(0, 14),
)
def test_adjustments(
    x: list[float],
    prompt: list[int],
    said: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    min_tokens: int,
) -> None:
    """Bias, then min_tokens, then the penalties, as vLLM orders them."""
    n = len(x)
    bias = {id: b for id, b in bias.items() if id < n}
    said = [id for id in said if id < n]
    stops = {0, 2}
    params = SamplingParams(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_token_ids=[2],
    )
    expected = np.array(x, dtype=np.float64)
    for id, b in bias.items():
        expected[id] += b
    if len(said) < min_tokens and n > 2:
        expected[[0, 2]] = -np.inf
    elif len(said) < min_tokens and n == 2:
        expected[0] = -np.inf
    for id in {*prompt, *said}:
        if id < n:
            expected[id] *= repetition if expected[id] <= 0 else 1 / repetition
    for id in set(said):
        expected[id] -= frequency * said.count(id) + presence
    sampler = Sampler(params, n, prompt, stop_ids=stops)
    for id in said:
        sampler.accept(id)
    logits = np.array(x, dtype=np.float32)
    adjusted = sampler._adjusted(logits)
    np.testing.assert_array_equal(
        logits if adjusted is None else adjusted, expected.astype(np.float32)
    )
    np.testing.assert_array_equal(logits, np.array(x, dtype=np.float32))  # not the caller's copy
    assert sampler.sample(logits).id == int(np.argmax(expected))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300])
def test_an_extreme_repetition_penalty_makes_no_nan(penalty: float) -> None:
    """As a float32 it is 0 or infinite, and the logit of a token that was seen may be 0."""
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    logits = np.array([0.0, 1.0, -1.0, 0.5], dtype=np.float32)
    assert Sampler(params, 4, [0]).sample(logits).id == 1
    assert Sampler(params, 4, [0, 1, 2]).sample(logits).id == (1 if penalty < 1 else 3)


def test_min_tokens_ends_and_never_leaves_nothing() -> None:
    logits = np.array([1.0, 5.0], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=2), 2, stop_ids=[1])
    seen = []
    for _ in range(3):
        seen.append(sampler.sample(logits).id)
        sampler.accept(seen[-1])
    assert seen == [0, 0, 1]
    only_stops = Sampler(SamplingParams(temperature=0, min_tokens=2), 2, stop_ids=[0, 1])
    assert only_stops.sample(logits).id == 1


def test_frequencies_by_chi_square() -> None:
    """20,000 draws of a fixed seed: chi-square of 7 degrees of freedom below its 99.9 % point."""
    x = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, -1.0]
    logits = np.array(x, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.5, seed=1234), len(x))
    counts = np.bincount([sampler.sample(logits).id for _ in range(20_000)], minlength=len(x))
    expected = 20_000 * softmax(np.array(x) / 1.5)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.32


def test_seeds() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)

    def run(seed: int | None, **kw: Any) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1, seed=seed, **kw), 1000)
        return [sampler.sample(logits).id for _ in range(20)]

    assert run(7) == run(7) == run(7, top_k=1000)  # a filter that takes nothing changes nothing
    assert run(7) != run(8)
    assert run(None) != run(None)
    assert run(-1) != run(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", [0, 5, 9])
def test_nan_names_the_step(temperature: float, where: int) -> None:
    logits = np.zeros(10, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature), 8)  # a NaN above the limit counts
    sampler.accept(0)
    sampler.accept(0)
    logits[where] = np.nan
    with pytest.raises(NumericsError, match=rf"step 2 have a NaN \(token {where}\)"):
        sampler.sample(logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0, top_logprobs=3), 4)
    logits = np.array([1, np.inf, -np.inf, np.inf], dtype=np.float32)
    got = [sampler.sample(logits) for _ in range(40)]
    assert {s.id for s in got} == ({1} if temperature == 0 else {1, 3})
    half = float(np.float32(-math.log(2)))
    assert got[0].logprob == half
    assert got[0].top_logprobs == ((1, half), (3, half))  # -inf is not listed
    with pytest.raises(NumericsError, match="step 0 are all -inf below token 4"):
        sampler.sample(np.full(6, -np.inf, dtype=np.float32))


@given(x=logits_of, top=st.integers(0, 20), temperature=st.sampled_from([0.0, 0.5]))
def test_logprobs_are_the_models_own(x: list[float], top: int, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=1, logprobs=True, top_logprobs=top, logit_bias={0: -50}
    )
    got = Sampler(params, len(x)).sample(np.array(x, dtype=np.float32))
    expected = np.log(softmax(np.array(x)))
    assert got.logprob == pytest.approx(expected[got.id], abs=1e-5)
    if top == 0:
        assert got.top_logprobs is None
        return
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))[:top]
    assert got.top_logprobs is not None
    assert [id for id, _ in got.top_logprobs] == order
    np.testing.assert_allclose([v for _, v in got.top_logprobs], expected[order], atol=1e-5)


@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([1e-3, 0.3, 1.0, 4.0]),
    top_p=st.sampled_from([1e-9, 0.2, 0.9, 0.999, 1 - 1e-7]),
    ties=st.booleans(),
)
def test_nucleus_of_a_large_vocabulary(seed: int, spread: float, top_p: float, ties: bool) -> None:
    """The way by buckets keeps exactly what sorting everything keeps."""
    logits = np.random.default_rng(seed).normal(0, spread, 9001)
    logits = np.round(logits / spread * 4) / 4 * spread if ties else logits
    weights = np.exp(logits - logits.max()).astype(np.float32)
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order], dtype=np.float64) - weights[order]
    goal = top_p * float(weights.sum(dtype=np.float64))
    count = max(1, int((before < goal).sum()))
    kept = nucleus(weights, top_p)
    assert np.all(np.diff(kept) > 0)
    # sums in another order: the edge may differ where a running sum equals the goal to 1e-12
    if abs(before[count - 1] - goal) > 1e-9 and (
        count == before.size or abs(before[count] - goal) > 1e-9
    ):
        np.testing.assert_array_equal(kept, np.sort(order[:count]))


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-45, 1e-3, 0.5, 1.0]), min_size=1, max_size=1500),
    u=st.floats(0, 1, exclude_max=True),
)
def test_pick_is_a_search_in_the_running_sum(weights: list[float], u: float) -> None:
    assume(any(weights))
    w = np.array(weights, dtype=np.float32)
    at = pick(w, u)
    assert w[at] > 0
    edges = np.cumsum(w, dtype=np.float64)
    assert edges[at] >= u * edges[-1] * (1 - 1e-9) - 1e-12
    assert edges[at] - w[at] <= u * edges[-1] * (1 + 1e-9) + 1e-12


def test_other_float_types_and_wrong_shapes() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        x = np.array([0, 2, 1], dtype=dtype)
        assert Sampler(SamplingParams(temperature=0), 3).sample(x).id == 1
        assert Sampler(SamplingParams(temperature=1, top_k=1), 3).sample(x).id == 1
    for bad in (np.zeros((1, 3), np.float32), np.zeros(2, np.float32)):
        with pytest.raises(UsageError, match=r"logits must have the shape \[3\]"):
            Sampler(SamplingParams(), 3).sample(bad)
    with pytest.raises(UsageError, match="at least one token, got 0"):
        Sampler(SamplingParams(), 0)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("temperature", -0.1, "a number of at least 0"),
        ("temperature", math.nan, "a number of at least 0"),
        ("temperature", math.inf, "a number of at least 0"),
        ("temperature", 10**400, "a number of at least 0"),
        ("temperature", "0.5", "a number of at least 0"),
        ("temperature", True, "a number of at least 0"),
        ("temperature", [1], "a number of at least 0"),
        ("top_p", 1.01, "a number from 0 to 1"),
        ("top_p", math.nan, "a number from 0 to 1"),
        ("min_p", -1e-9, "a number from 0 to 1"),
        ("top_k", -2, "a whole number of at least -1"),
        ("top_k", 2.0, "a whole number of at least -1"),
        ("top_k", True, "a whole number of at least -1"),
        ("repetition_penalty", 0, "a number above 0"),
        ("repetition_penalty", -1, "a number of at least 0"),
        ("presence_penalty", 2.1, "a number from -2 to 2"),
        ("frequency_penalty", -2.1, "a number from -2 to 2"),
        ("seed", -2, "a whole number from -1 to 18446744073709551615"),
        ("seed", 2**64, "a whole number from -1 to 18446744073709551615"),
        ("seed", 1.5, "a whole number from -1"),
        ("max_tokens", -1, "a whole number of at least 0"),
        ("max_tokens", "32", "a whole number of at least 0"),
        ("min_tokens", -1, "a whole number of at least 0"),
        ("ignore_eos", 1, "true or false"),
        ("stop", 3, "a text or a list of texts"),
        ("stop", ["a", 3], "a text or a list of texts"),
        ("stop", ["x"] * 65, "at most 64 texts"),
        ("stop", ["a", ""], "an empty text"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", [-1], "a whole number of at least 0"),
        ("stop_token_ids", [1, "2"], "a whole number of at least 0"),
        ("logit_bias", [1], "an object of token id: bias"),
        ("logit_bias", {"x": 1}, "a whole number of at least 0"),
        ("logit_bias", {-1: 1}, "a whole number of at least 0"),
        ("logit_bias", {1: 101}, "a number from -100 to 100"),
        ("logit_bias", {1: math.nan}, "a number from -100 to 100"),
        ("top_logprobs", 21, "a whole number from 0 to 20"),
        ("logprobs", 21, "a whole number from 0 to 20"),
        ("logprobs", "yes", "a whole number from 0 to 20"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert wanted in message
    assert "\n" not in message
    assert len(message) < 200


def test_values_in_their_other_forms() -> None:
    p = SamplingParams(
        top_k=-1, stop="END", stop_token_ids={3}, logit_bias={"5": 1}, logprobs=3, seed=np.int64(4)
    )
    assert (p.top_k, p.stop, p.stop_token_ids, p.seed) == (0, ("END",), (3,), 4)
    assert p.logit_bias == {5: 1.0}
    assert (p.logprobs, p.top_logprobs) == (True, 3)
    assert SamplingParams(top_logprobs=2).logprobs
    assert SamplingParams(temperature=None, stop=None, logit_bias=None) == SamplingParams()
    with pytest.raises(UsageError, match=r"min_tokens must be at most max_tokens \(3\), got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(UsageError, match="token id 8; the vocabulary ends at 7"):
        Sampler(SamplingParams(logit_bias={8: 1}), 8)


def test_precedence_of_defaults() -> None:
    assert defaults({}) == BUILT_IN
    # only what the file states: no top_k = 50 of another program's defaults
    assert defaults({"temperature": 0.3}) == {**BUILT_IN, "temperature": 0.3}
    got = defaults({"temperature": 0.3, "top_k": 5}, None, {"temperature": 0.9, "top_p": None})
    assert got == {**BUILT_IN, "temperature": 0.9, "top_k": 5}
    assert defaults({"max_new_tokens": 9, "top_k": None})["max_tokens"] == 9
    assert defaults({"do_sample": False, "temperature": 0.6})["temperature"] == 0
    assert defaults({"do_sample": False}, None, {"temperature": 0.6})["temperature"] == 0.6
    with pytest.raises(ModelError, match=r"generation_config.json: top_p must be .*, got 7"):
        defaults({"top_p": 7})


def test_thinking_sets() -> None:
    qwen3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert defaults(qwen3, True) == THINKING
    assert defaults(qwen3, False) == NOT_THINKING
    assert defaults(qwen3, None) == {**BUILT_IN, **THINKING}
    assert defaults(qwen3, False, {"top_p": 0.5}) == {**NOT_THINKING, "top_p": 0.5}
    assert defaults({}, True) == THINKING
    assert defaults({}, False) == NOT_THINKING
    # a file of other values means them
    other = {"temperature": 0.2, "top_k": 20}
    assert defaults(other, False) == {**BUILT_IN, **other}
