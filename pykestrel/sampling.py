"""From logits to the next token, and where the numbers that steer it come from.

The order is that of vLLM and Hugging Face:

    raw logits ─► ids the tokenizer lacks are masked ─► + logit_bias ─► stop ids masked while
    fewer than min_tokens ─► repetition, frequency, presence penalty ─► / temperature ─► top-k
    ─► top-p ─► min-p ─► one draw

Arithmetic is float32 after the maximum is subtracted (so the best candidate has weight 1 and no
setting gives 0 / 0); sums that decide are float64. At least one candidate always survives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .engine import Answer, Candidates, Picked, Want
from .errors import ModelError, NumericsError, UsageError
from .filters import HOTTEST, keep_by_mass, keep_top_k, narrow, pick, scaled

GREEDY_BELOW = 1e-5  # a temperature under this is argmax, as in vLLM
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20  # OpenAI's and vLLM's limit
CANDIDATES = 256  # logits that are asked of an engine where filters keep few of a vocabulary
MAX_CANDIDATES = 1024  # the most that an engine gives

# What a run uses when neither the caller nor the model's generation_config.json says otherwise.
# Only the temperature is not neutral: at 1.0 small models ramble, and the 0.8 of llama.cpp and
# Ollama comes with filters (top-k 40, top-p 0.9) that would be an unstated default here. 0.7 is
# also what Qwen recommends for answers without thinking.
BUILT_IN: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}

# Qwen3's recommendation. Its generation_config.json holds the first set only.
THINKING: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
NOT_THINKING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}

_FROM_FILE = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the sampler: OpenAI's names and vLLM's.

    None for any field means its default. Raises UsageError that names the field, what it got and
    what it takes.
    """

    max_tokens: int | None = None  # None: until the model stops or the context is full
    temperature: float = BUILT_IN["temperature"]  # below 1e-5: always the most likely token
    top_p: float = BUILT_IN["top_p"]  # 0..1: the fewest likeliest tokens with this much mass
    top_k: int = BUILT_IN["top_k"]  # this many likeliest tokens, ties included; 0 or -1: all
    min_p: float = BUILT_IN["min_p"]  # 0..1: at least this fraction of the best probability
    repetition_penalty: float = 1.0  # > 0; divides (multiplies, if negative) logits already seen
    presence_penalty: float = 0.0  # -2..2; subtracted once for a token in the answer so far
    frequency_penalty: float = 0.0  # -2..2; subtracted for every time it is there
    seed: int | None = None  # 0..2**64-1; None or -1: another one every time
    stop: tuple[str, ...] = ()  # a str is one stop string
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # go on after an end-of-text token
    min_tokens: int = 0  # no stop token before this many
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # id -> -100..100
    logprobs: bool = False  # an int n is True with top_logprobs n
    top_logprobs: int = 0  # 0..20; above 0 implies logprobs

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the class is frozen for everybody else
        for f in fields(self):
            if getattr(self, f.name) is None and f.name not in ("max_tokens", "seed"):
                set_(self, f.name, {} if f.name == "logit_bias" else f.default)
        if self.max_tokens is not None:
            set_(self, "max_tokens", _whole("max_tokens", self.max_tokens, 0, None))
        set_(self, "temperature", _number("temperature", self.temperature, 0, None))
        set_(self, "top_p", _number("top_p", self.top_p, 0, 1))
        set_(self, "top_k", max(0, _whole("top_k", self.top_k, -1, None)))
        set_(self, "min_p", _number("min_p", self.min_p, 0, 1))
        penalty = _number("repetition_penalty", self.repetition_penalty, 0, None)
        if penalty == 0:
            raise UsageError("repetition_penalty must be a number above 0 (1 is off), got 0")
        set_(self, "repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            set_(self, name, _number(name, getattr(self, name), -2, 2))
        if self.seed is not None:
            seed = _whole("seed", self.seed, -1, 2**64 - 1)
            set_(self, "seed", None if seed == -1 else seed)
        set_(self, "stop", _stop_strings(self.stop))
        set_(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise UsageError(f"ignore_eos must be true or false, got {_shown(self.ignore_eos)}")
        set_(self, "min_tokens", _whole("min_tokens", self.min_tokens, 0, None))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        set_(self, "logit_bias", _bias(self.logit_bias))
        top = _whole("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        wanted: Any = self.logprobs
        if not isinstance(wanted, (bool, np.bool_)):  # the completions API gives a number here
            top = max(top, _whole("logprobs", wanted, 0, MAX_TOP_LOGPROBS))
            wanted = True
        set_(self, "top_logprobs", top)
        set_(self, "logprobs", bool(wanted) or top > 0)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def defaults(
    generation_config: Mapping[str, Any],
    thinking: bool | None = None,
    user: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The sampling values of a request: the user's, else those *written in* the model's
    generation_config.json, else the built-in ones; a user's None counts as not given.

    thinking: whether this request thinks; None for a template without that switch. A file that
    states Qwen3's thinking set (or nothing) gives way to the set without thinking when thinking is
    False, value by value where the user chose none. Raises ModelError for a damaged value.
    """
    stated = _stated(generation_config)
    built_in = dict(BUILT_IN)
    if thinking is not None:
        recommended = THINKING if thinking else NOT_THINKING
        chosen = {k: v for k, v in stated.items() if k in THINKING}
        if all(v == THINKING[k] for k, v in chosen.items()):
            built_in = dict(recommended)
            stated = {k: v for k, v in stated.items() if k not in THINKING}
    given = {k: v for k, v in (user or {}).items() if v is not None}
    return {**built_in, **stated, **given}


def _stated(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for key, name in _FROM_FILE.items():
        value = generation_config.get(key)
        if value is None:
            continue
        try:
            stated[name] = getattr(SamplingParams(**{name: value}), name)
        except UsageError as error:
            raise ModelError(
                f"generation_config.json: {error}; correct or remove {key} in the file"
            ) from None
    if generation_config.get("do_sample") is False:
        stated["temperature"] = 0.0  # the file asks for the most likely token
    return stated


@dataclass(frozen=True)
class Sampled:
    """One sampled token. Log-probabilities are those of the model itself, before bias, penalties,
    temperature and filters (vLLM's default), over the whole vocabulary."""

    id: int
    logprob: float | None = None  # None unless logprobs were asked for
    top_logprobs: tuple[tuple[int, float], ...] | None = None  # (id, logprob), best first


class Sampler:
    """Samples one sequence: call `sample` with the logits, then `accept` with the chosen id.

    The random numbers are NumPy's PCG64 of the seed, one a sampled token and none when greedy: a
    seed gives the same tokens again for the same logits. The exponential may differ in the last
    bit between processors, so another machine can, rarely, choose differently.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_limit: int,
        prompt_ids: Iterable[int] = (),
        *,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """vocab_limit: ids at and above it are never chosen (the tokenizer's length); prompt_ids:
        what the repetition penalty has seen; stop_ids: what min_tokens holds off, beside
        ``params.stop_token_ids``. Raises UsageError for a logit_bias id of no token."""
        if vocab_limit < 1:
            raise UsageError(f"the vocabulary must have at least one token, got {vocab_limit}")
        self.params = params
        self.step = 0  # tokens accepted so far
        self._limit = vocab_limit
        for id in params.logit_bias:
            if id >= vocab_limit:
                raise UsageError(
                    f"logit_bias has the token id {id}; the vocabulary ends at {vocab_limit - 1}"
                )
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        held_off = {*stop_ids, *params.stop_token_ids} if params.min_tokens else set()
        self._held_off = np.array([i for i in held_off if 0 <= i < vocab_limit], dtype=np.int64)
        self._repetition = params.repetition_penalty != 1
        self._counting = params.presence_penalty != 0 or params.frequency_penalty != 0
        seen = sorted(set(prompt_ids)) if self._repetition else []
        self._seen = _Growing(int(i) for i in seen if 0 <= i < vocab_limit)
        self._said = _Growing(())

    @cached_property
    def _rng(self) -> np.random.Generator:
        """Made when it is needed: NumPy imports this part of itself then, which takes 20 ms."""
        return np.random.Generator(np.random.PCG64(self.params.seed))

    def sample(self, logits: NDArray[Any]) -> Sampled:
        """Choose a token. logits: [V] of any float dtype, V >= vocab_limit; it is not changed.

        Raises NumericsError, naming the step, when a NaN is in the logits or none is above -inf.
        """
        raw = np.asarray(logits)
        if raw.ndim != 1 or raw.shape[0] < self._limit:
            raise UsageError(
                f"logits must have the shape [{self._limit}] or longer, got {list(raw.shape)}"
            )
        best = int(raw.argmax())  # of an array with a NaN: the first NaN
        if math.isnan(raw[best]):
            raise NumericsError(
                f"the logits of step {self.step} have a NaN (token {best}): the forward pass broke "
                "down; check the weights with `pykestrel info`, or try another quantisation"
            )
        x = self._adjusted(raw)
        if x is None:
            x = raw[: self._limit]
            best = best if best < self._limit else int(x.argmax())
        else:
            best = int(x.argmax())
        if x[best] == -np.inf:
            raise NumericsError(
                f"the logits of step {self.step} are all -inf below token {self._limit}: there is "
                "nothing to choose from; check the weights with `pykestrel info`"
            )
        chosen = best if self.params.greedy else self._draw(x, float(x[best]))
        if not self.params.logprobs:
            return Sampled(chosen)
        logprobs = _log_softmax(raw)
        return Sampled(chosen, float(logprobs[chosen]), self._top(logprobs))

    def want(self) -> Want | None:
        """What of the next logits is enough for `choose`; None: all of them."""
        p = self.params
        hold_off = self.step < p.min_tokens and self._held_off.size > 0
        adjusts = self._bias.size > 0 or self._repetition or self._counting or hold_off
        if p.logprobs or adjusts:
            return None
        if p.greedy:
            return Want(self._limit)
        if 0 < p.top_k < self._limit:
            if p.top_k >= MAX_CANDIDATES:
                return None
            top = min(MAX_CANDIDATES, max(CANDIDATES, 2 * p.top_k))
        elif p.top_p < 1 or p.min_p > 0:
            top = CANDIDATES
        else:
            return None
        return Want(self._limit, top, min(p.temperature, HOTTEST))

    def choose(self, answer: Answer, logits: Callable[[], NDArray[Any]]) -> Sampled:
        """`sample` from the answer to `want`, with the same result as from all logits, which are
        fetched only when the answer does not prove it."""
        if isinstance(answer, Picked):
            return Sampled(answer.id)
        if isinstance(answer, Candidates):
            kept = narrow(answer, self.params, self._limit)
            if kept is not None:
                ids, weights = kept
                return Sampled(int(ids[pick(weights, self._rng.random())]))
            answer = logits()
        return self.sample(answer)

    def accept(self, id: int) -> None:
        """Tell the sampler which token was taken (usually the sampled one)."""
        self.step += 1
        if 0 <= id < self._limit:
            if self._repetition:
                self._seen.add(id)
            if self._counting:
                self._said.add(id)

    def _adjusted(self, raw: NDArray[Any]) -> NDArray[np.float32] | None:
        """A float32 copy [vocab_limit] with bias, held-off ids, penalties; None if none is on."""
        hold_off = self.step < self.params.min_tokens and self._held_off.size > 0
        if not (hold_off or self._bias.size or self._seen.size or self._said.size):
            return None
        x = np.array(raw[: self._limit], dtype=np.float32)
        if self._bias.size:
            x[self._bias_ids] += self._bias
        if hold_off:
            kept = x[self._held_off]
            x[self._held_off] = -np.inf
            if x.max() == -np.inf:  # nothing but stop ids is left: one of them it is
                x[self._held_off] = kept
        p = self.params
        if self._seen.size:
            ids = self._seen.ids
            old = x[ids]
            # neither 0 nor infinite as a float32: with a logit of 0 that would be a NaN
            penalty = np.float32(min(max(p.repetition_penalty, 1e-30), 1e30))
            with np.errstate(over="ignore"):
                x[ids] = np.where(old > 0, old / penalty, old * penalty)
        if self._said.size:
            counts = self._said.counts
            x[self._said.ids] -= p.frequency_penalty * counts + np.float32(p.presence_penalty)
        return x

    def _draw(self, x: NDArray[Any], top: float) -> int:
        """One random id of those that pass the filters. x: [vocab_limit]; top: its maximum."""
        p = self.params
        u = self._rng.random()
        if top == np.inf:  # the infinite ones share all probability
            ids = np.flatnonzero(x == np.inf)
            return int(ids[int(u * ids.size)])
        with np.errstate(over="ignore", under="ignore"):
            z = scaled(x, top, p.temperature)
            ids: NDArray[np.intp] | None = None  # type: ignore[no-redef]  # None: all of them
            if 0 < p.top_k < z.size:
                ids = keep_top_k(z, p.top_k)
                z = z[ids]
            weights = np.exp(z, out=z)
        for kept in keep_by_mass(weights, p):
            weights = weights[kept]
            ids = kept if ids is None else ids[kept]
        at = pick(weights, u)
        return at if ids is None else int(ids[at])

    def _top(self, logprobs: NDArray[np.float32]) -> tuple[tuple[int, float], ...] | None:
        count = min(self.params.top_logprobs, self._limit)
        if not count:
            return None
        x = logprobs[: self._limit]
        least = np.partition(x, x.size - count)[x.size - count]
        ids = np.flatnonzero((x >= least) & (x > -np.inf))
        ids = ids[np.argsort(-x[ids], kind="stable")][:count]  # ties: lower id first
        return tuple((int(i), float(x[i])) for i in ids)


class _Growing:
    """A set of ids with how often each was added, as arrays."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._place = {id: n for n, id in enumerate(ids)}
        self.size = len(self._place)
        self._ids = np.zeros(self.size + 256, dtype=np.int64)
        self._ids[: self.size] = list(self._place)
        self._counts = np.ones(self.size + 256, dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self.size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self.size]

    def add(self, id: int) -> None:
        place = self._place.get(id)
        if place is not None:
            self._counts[place] += 1
            return
        if self.size == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.ones_like(self._counts)])
        self._place[id] = self.size
        self._ids[self.size] = id
        self.size += 1


def _log_softmax(raw: NDArray[Any]) -> NDArray[np.float32]:
    x = np.asarray(raw, dtype=np.float32)
    top = x.max()
    if top == np.inf:
        infinite = x == np.inf
        return np.where(infinite, np.float32(-math.log(infinite.sum())), np.float32(-np.inf))
    with np.errstate(under="ignore"):
        z: NDArray[np.float32] = x - top
        z -= np.float32(math.log(float(np.exp(z).sum(dtype=np.float64))))
    return z


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())  # an array takes many lines
    return text if len(text) <= 60 else text[:57] + "..."


def _range(low: float, high: float | None) -> str:
    return f"from {low} to {high}" if high is not None else f"of at least {low}"


def _number(name: str, value: Any, low: float, high: float | None) -> float:
    """``value`` as a float within the closed range, or a UsageError that names the parameter."""
    ok = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
    try:
        number = float(value) if ok else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < low or (high is not None and number > high):
        raise UsageError(f"{name} must be a number {_range(low, high)}, got {_shown(value)}")
    return number


def _whole(name: str, value: Any, low: int, high: int | None) -> int:
    ok = isinstance(value, Integral) and not isinstance(value, (bool, np.bool_))
    if not ok or value < low or (high is not None and value > high):
        raise UsageError(f"{name} must be a whole number {_range(low, high)}, got {_shown(value)}")
    return int(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) for s in stops):
        raise UsageError(f"stop must be a text or a list of texts, got {_shown(value)}")
    if len(stops) > MAX_STOPS:
        raise UsageError(f"stop must have at most {MAX_STOPS} texts, got {len(stops)}")
    if "" in stops:
        raise UsageError("stop must not have an empty text: it would end every answer at once")
    return tuple(stops)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise UsageError(f"{name} must be a list of token ids, got {_shown(value)}")
    return tuple(_whole(f"{name}[{n}]", id, 0, None) for n, id in enumerate(value))


def _bias(value: Any) -> dict[int, float]:
    """logit_bias as {id: bias}; ids may be decimal texts, since JSON has no other keys."""
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias must be an object of token id: bias, got {_shown(value)}")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        id: Any = key
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
            id = int(key)
        id = _whole("a token id of logit_bias", id, 0, None)
        bias[id] = _number(f"logit_bias[{id}]", amount, -100, 100)
    return bias
