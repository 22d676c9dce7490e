"""From a prompt to text: one engine's sequence, the token loop, and what comes out of it.

    ids ─► Session.prompt ─► answer ─► Sampler ─► StreamDecoder ─► StopMatcher ─► ThinkSplitter
                               ▲          │                                             │
                               └─ extend ◄┘                                           Chunk

An answer is all logits, or the little of them that the sampler asked for.

`session.Session` holds the engine; nothing here touches it but through that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import ContextError, KestrelError, UsageError

if TYPE_CHECKING:
    from .engine import Engine
    from .sampling import Sampler, SamplingParams
    from .session import Session
    from .text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass
class Timings:
    """Where the time of one run went; seconds by a monotonic clock. It grows while the run does."""

    load_s: float = 0.0  # of the model, once
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt: already in the K/V, not computed again
    prompt_s: float = 0.0
    ttft_s: float = 0.0  # from the call to the first token, tokenizing included
    decode_tokens: int = 0  # forward passes after the prompt's: the first token needs none
    decode_s: float = 0.0  # their time, sampling and text included

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens a second, counting only those that were computed."""
        return _rate(self.prompt_tokens - self.reused_tokens, self.prompt_s)

    @property
    def decode_tps(self) -> float:
        """Generated tokens a second after the first one."""
        return _rate(self.decode_tokens, self.decode_s)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Chunk:
    """One sampled token of a stream, and the text that became certain with it.

    Text may lag behind its token: half a character, or the possible start of a stop string, waits
    for the next chunk. ``text`` is all of the text, think tags included; after a chat prompt the
    same text is also split into ``reasoning_content`` and ``content``. The last chunk, and no
    other, has a ``finish_reason``.
    """

    text: str
    token: int | None  # None only when max_tokens is 0
    content: str = ""
    reasoning_content: str = ""
    logprob: float | None = None  # of the token, when logprobs were asked for
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or the token id that ended the run
    timings: Timings = field(default_factory=Timings, repr=False, compare=False)

    @property
    def reasoning(self) -> bool:
        """True when all visible text of this chunk belongs to the model's thinking."""
        return bool(self.reasoning_content) and not self.content


@dataclass(frozen=True)
class Generation:
    """A finished run. ``text`` == the joined ``text`` of its chunks; ``tokens`` has every sampled
    id, the end-of-text id included when there was one (it is never part of the text)."""

    text: str
    tokens: list[int]
    content: str  # text without the thinking
    reasoning_content: str | None  # None: the model did not think, or the prompt was no chat
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    logprobs: list[float] | None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None
    timings: Timings

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, chunks: Iterator[Chunk]) -> Generation:
        """Run a stream to its end."""
        seen = list(chunks)
        last = seen[-1]
        if last.finish_reason is None:
            raise KestrelError("the stream ended without a finish reason: it was closed early")
        sampled = [c for c in seen if c.token is not None]
        top = [c.top_logprobs for c in sampled if c.top_logprobs is not None]
        return cls(
            text="".join(c.text for c in seen),
            tokens=[c.token for c in sampled if c.token is not None],
            content="".join(c.content for c in seen),
            reasoning_content="".join(c.reasoning_content for c in seen) or None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            prompt_tokens=last.timings.prompt_tokens,
            logprobs=[c.logprob for c in sampled if c.logprob is not None] or None,
            top_logprobs=top or None,
            timings=last.timings,
        )


@dataclass(frozen=True)
class TextPlan:
    """How ids become text: None of it for a model without a tokenizer."""

    tokenizer: Tokenizer | None
    split_thinking: bool = False  # a chat prompt: part the thinking from the answer
    starts_inside: bool = False  # the prompt ended inside an open <think>


class TextPipe:
    """Decoder, stop strings and thinking in a row; push ids, get (text, content, reasoning)."""

    def __init__(self, plan: TextPlan, stop: Sequence[str]) -> None:
        self.hit: str | None = None  # the stop string that was met
        self._decoder = self._matcher = self._splitter = None
        if plan.tokenizer is None:
            return
        from .text.detokenize import StreamDecoder
        from .text.stop import StopMatcher
        from .text.thinking import ThinkSplitter

        self._decoder = StreamDecoder(plan.tokenizer, skip_special_tokens=True)
        self._matcher = StopMatcher(stop)
        if plan.split_thinking:
            self._splitter = ThinkSplitter(plan.starts_inside)

    def push(self, token: int | None, *, last: bool) -> tuple[str, str, str]:
        """Add a token (None: only flush). With ``last`` everything held back comes out."""
        if self._decoder is None or self._matcher is None:
            return "", "", ""
        text = ""
        if token is not None:
            text, self.hit = self._matcher.push(self._decoder.push(token))
        if last and self.hit is None:
            tail, self.hit = self._matcher.push(self._decoder.flush())
            text += tail + self._matcher.flush()
            self.hit = self._matcher.hit  # the end of the text may decide a match
        if self._splitter is None:
            return text, text, ""
        parts = self._splitter.push(text)
        if last or self.hit is not None:
            parts = [*parts, *self._splitter.flush()]
        content = "".join(piece for channel, piece in parts if channel == "content")
        return text, content, "".join(piece for channel, piece in parts if channel != "content")


def check_fits(count: int, ctx_size: int, limit: int, *, answer: bool = True) -> None:
    """Raise ContextError unless a prompt of ``count`` ids fits, and with ``answer`` one token more.

    limit: the largest ctx_size that the model could have.
    """
    if count + answer > ctx_size:
        ends = ", one of them for the answer" if answer else ""
        more = " or use a larger ctx_size" if ctx_size < limit else ", as the model has no more"
        raise ContextError(
            f"the prompt has {count} tokens and the context holds {ctx_size}{ends}: "
            f"shorten the prompt{more}"
        )


def check_ids(ids: Sequence[int] | NDArray[Any], vocab_size: int) -> list[int]:
    """Ids as Python ints; raises UsageError for an empty list or an id outside the vocabulary."""
    if len(ids) == 0:
        raise UsageError("the prompt is empty: it has no tokens to start from")
    checked: list[int] = []
    for where, value in enumerate(ids):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            words = " ".join(repr(value).split())  # an array of arrays takes many lines
            words = words if len(words) <= 60 else words[:57] + "..."
            raise UsageError(
                f"prompt ids must be whole numbers, got {words} ({type(value).__name__}) "
                f"at index {where}"
            )
        if not 0 <= value < vocab_size:
            raise UsageError(
                f"token id {value} at index {where} is outside the vocabulary "
                f"(0 to {vocab_size - 1})"
            )
        checked.append(int(value))
    return checked


@dataclass
class Job:
    """One checked call: what `run` needs besides the session."""

    ids: list[int]
    sampler: Sampler
    pipe: TextPipe
    stop_ids: frozenset[int]
    most: int  # tokens at most
    reuse: bool  # keep what the K/V holds of the prompt
    timings: Timings
    started: float  # time.perf_counter() of the call


def make_job(
    engine: Engine,
    ids: list[int],
    params: SamplingParams,
    *,
    limit: int,
    plan: TextPlan,
    eos_ids: frozenset[int],
    reuse: bool,
    timings: Timings,
    started: float,
) -> Job:
    """A job of ids that `check_ids` made; raises for everything that is still wrong with it.

    limit: the largest ctx_size that the model could have.
    """
    from .sampling import Sampler

    check_fits(len(ids), engine.ctx_size, limit)
    known = engine.vocab_size
    if plan.tokenizer is not None:
        known = min(known, len(plan.tokenizer))
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= eos_ids
    room = engine.ctx_size - len(ids)
    timings.prompt_tokens = len(ids)
    return Job(
        ids=ids,
        sampler=Sampler(params, known, ids, stop_ids=stop_ids),
        pipe=TextPipe(plan, params.stop),
        stop_ids=stop_ids,
        most=room if params.max_tokens is None else min(room, params.max_tokens),
        reuse=reuse,
        timings=timings,
        started=started,
    )


def run(session: Session, job: Job, on_step: Callable[[], None]) -> Iterator[Chunk]:
    """The token loop: sample, show, feed back. ``on_step`` is called whenever it is resumed.

    The last sampled token is never fed to the engine: nothing would look at its logits.
    """
    timings = job.timings
    if job.most == 0:
        yield Chunk("", None, finish_reason="length", timings=timings)
        return
    timings.reused_tokens = session.shared_prefix(job.ids) if job.reuse else 0
    before = time.perf_counter()
    answer = session.prompt(job.ids, reuse=job.reuse, want=job.sampler.want())
    timings.prompt_s = time.perf_counter() - before
    count, decode_start = 0, before
    while True:
        picked = job.sampler.choose(answer, session.last_logits)
        job.sampler.accept(picked.id)
        count += 1
        finish: FinishReason | None = None
        reason: str | int | None = None
        if picked.id in job.stop_ids:
            finish, reason = "stop", picked.id
        elif count >= job.most:
            finish = "length"
        # a token that stops the run is no part of its text
        shown = None if finish == "stop" else picked.id
        text, content, thought = job.pipe.push(shown, last=finish is not None)
        if job.pipe.hit is not None:
            finish, reason = "stop", job.pipe.hit
        now = time.perf_counter()
        if count == 1:
            timings.ttft_s = now - job.started
            decode_start = now
        timings.decode_tokens, timings.decode_s = count - 1, now - decode_start
        yield Chunk(
            text,
            picked.id,
            content=content,
            reasoning_content=thought,
            logprob=picked.logprob,
            top_logprobs=picked.top_logprobs,
            finish_reason=finish,
            stop_reason=reason,
            timings=timings,
        )
        if finish is not None:
            return
        on_step()
        # the consumer's own time between two chunks is not the engine's
        decode_start += time.perf_counter() - now
        answer = session.extend([picked.id], want=job.sampler.want())
