"""`load` and `Model`: a model directory or GGUF file, its engine, its tokenizer, one sequence.

One model runs one sequence at a time (`session`): a call from a second thread waits for its turn, a
call from the thread that has a stream open is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .ahead import Ahead
from .arguments import (
    DEVICES,
    KV_KINDS,
    OFFLOADS,
    PREFILLS,
    QUANTS,
    check_ctx,
    flop_of,
    one_of,
    path_of,
)
from .device import Running, choose_device
from .engines import Progress, Request, open_engine, verify_wanted
from .errors import TokenizerError, UsageError
from .generate import (
    Chunk,
    Generation,
    Job,
    TextPlan,
    Timings,
    check_fits,
    check_ids,
    make_job,
    run,
)
from .meter import LoadMeter
from .session import Session, Turn
from .threads import BlasLimit
from .units import parse_bytes, parse_count
from .weights import Traffic

if TYPE_CHECKING:
    from types import TracebackType

    from .config import ModelConfig
    from .engine import Engine
    from .loading import Source
    from .sampling import SamplingParams
    from .text.chat import ChatTemplate
    from .text.tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int] | NDArray[np.integer[Any]] | Sequence[Mapping[str, Any]]"


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "auto",
    quant: str | None = None,
    ctx_size: int | str | None = None,
    kv: str = "int8",
    cpu_cache: int | str | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    prefill: str = "auto",
    verify: bool | None = None,
    vram_budget: int | str | None = None,
    host_budget: int | str | None = None,
    min_flop: float | None = None,
    offload: str = "segments",
    meter: LoadMeter | None = None,
) -> Model:
    """Load a model: a directory in Hugging Face form, a ``.gguf`` file, or a cached hub name.

    device: "auto" | "cuda" | "cpu". quant: "bf16" | "q8" | "q4"; None takes what a quantised
    directory holds, else q8. ctx_size: positions of K/V ("32k" is accepted); None is the model's
    own limit, at most 4096. kv: "int8" | "f16" | "f32". cpu_cache: bytes for float32 copies of
    weights on the CPU ("1GB"); None measures what is free. chat_template: a Jinja file or text that
    replaces the model's own. progress: called with (tensor, bytes done, bytes in all). threads: of
    the CPU engine and of BLAS while this model lives (of the whole process's BLAS: of several
    models the one loaded last decides); None leaves BLAS alone. Needs ``pykestrel[cpu]``.
    For finding faults of a GPU: prefill "cpu" computes prompts on the CPU and decodes on the GPU;
    verify runs every token on both and warns of the first difference (None: PYKESTREL_VERIFY).
    vram_budget: bytes of weights on the GPU ("4GB"; K/V and buffers come on top): where they do
    not hold the model, the CPU runs it and the GPU what of it lies there. host_budget: bytes of the
    CPU's weights in memory; those beyond lie in a file of the cache directory. offload: "segments":
    runs of whole layers at once, and single products besides; "projections": single products only.
    min_flop: products of fewer operations stay on the CPU; None measures where that pays.
    meter: grows while the weights are loaded; it becomes `Model.loaded`.

    Raises UsageError for a wrong argument, CudaUnavailable, OutOfMemory, and ModelError for
    everything that is wrong with the files.
    """
    started = time.perf_counter()
    one_of("device", device, DEVICES)
    one_of("kv", kv, KV_KINDS)
    one_of("prefill", prefill, PREFILLS)
    if quant is not None:
        one_of("quant", quant, QUANTS)
    budget = None if cpu_cache is None else parse_bytes(cpu_cache, "cpu_cache")
    vram = None if vram_budget is None else parse_bytes(vram_budget, "vram_budget")
    host = None if host_budget is None else parse_bytes(host_budget, "host_budget")
    if vram is not None and device == "cpu":
        raise UsageError(
            "vram_budget (--vram-budget) is of a GPU: it cannot be had with device='cpu' (--cpu, "
            "PYKESTREL_DEVICE)"
        )
    one_of("offload", offload, OFFLOADS)
    min_flop = flop_of(min_flop)
    wanted_ctx = None if ctx_size is None else parse_count(ctx_size, "ctx_size")
    if threads is not None:
        threads = parse_count(threads, "threads")
        if threads < 1:
            raise UsageError("threads must be at least 1, got 0")
    name = path_of(path, "the model", "a directory, a .gguf file or a hub name")
    if chat_template is not None:
        path_of(chat_template, "chat_template", "a file or Jinja text")
    running = choose_device(device)

    from .loading import read_config, read_generation_config, resolve_model
    from .loading.quantized import check_stored, stored_quant

    source = resolve_model(name)
    config = read_config(source)
    ctx = check_ctx(wanted_ctx, config)
    stored = stored_quant(source)
    check_stored(source, stored, quant)
    kind = quant or (stored.kind if stored is not None else "q8")
    generation_config = read_generation_config(source)
    template = None if chat_template is None else _given_template(source, chat_template)
    request = Request(
        source=source,
        config=config,
        quant=kind,
        fixed_quant=stored is not None,
        ctx_size=ctx,
        kv=kv,
        device=device,
        prefill=prefill,
        verify=verify_wanted(verify),
        cpu_cache=budget,
        threads=threads,
        progress=progress,
        meter=meter or LoadMeter(),
        vram_budget=vram,
        host_budget=host,
        min_flop=min_flop,
        offload=offload,
    )
    blas = None if threads is None else BlasLimit(threads)
    tokenizer = Ahead(lambda: _tokenizer(source))
    try:
        engine, running = open_engine(request, running)
    except BaseException:
        if blas is not None:
            blas.release()
        raise
    model = Model(
        source,
        config,
        engine,
        running,
        quant=kind,
        kv=kv,
        traffic=Traffic.of(config, kind),
        generation_config=generation_config,
        chat_template=template,
        blas=blas,
        tokenizer=tokenizer,
    )
    model.load_s = time.perf_counter() - started
    model.loaded = request.meter
    return model


def _tokenizer(source: Source) -> Tokenizer:
    from .text.tokenizer import Tokenizer

    return Tokenizer.from_source(source)


def _given_template(source: Source, given: str | os.PathLike[str]) -> ChatTemplate:
    from .text.chat import ChatTemplate

    return ChatTemplate.from_source(source, given if isinstance(given, str) else Path(given))


class Model:
    """A loaded model. Use it as a context manager, or ``close()`` it."""

    load_s: float = 0.0  # seconds that `load` took

    def __init__(
        self,
        source: Source,
        config: ModelConfig,
        engine: Engine,
        running: Running,
        *,
        quant: str,
        kv: str,
        traffic: Traffic,
        generation_config: dict[str, Any],
        chat_template: ChatTemplate | None = None,
        blas: BlasLimit | None = None,
        tokenizer: Ahead[Tokenizer] | None = None,
    ) -> None:
        self.source = source
        self.config = config
        self.quant = quant  # of the weights: "bf16" | "q8" | "q4"
        self.kv = kv
        self.traffic = traffic
        self.generation_config = generation_config  # what its file states
        self._running = running
        self.session = Session(engine)  # what `bench` and `perplexity` drive directly
        self._turn = Turn()
        self._given_template = chat_template
        self._blas = blas
        self._tokenizer = tokenizer
        self.loaded = LoadMeter()  # how its weights came to where they are

    # -- what it is ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def engine(self) -> Running:
        """What runs this model now and why: ``str(model.engine)`` is one line."""
        fallback: str | None = getattr(self.session.engine, "fallback", None)
        return self._running if fallback is None else Running("cpu", fallback)

    @property
    def ctx_size(self) -> int:
        return self.session.engine.ctx_size

    @property
    def position(self) -> int:
        """How many positions of the context the K/V holds now."""
        return self.session.position

    @property
    def _limit(self) -> int:
        """The largest context it could be loaded with."""
        return self.config.max_position_embeddings

    @property
    def threads(self) -> int | None:
        """How many threads were asked for; None: the engine's and BLAS's own choice."""
        return None if self._blas is None else self._blas.count

    @property
    def closed(self) -> bool:
        return self.session.closed

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises TokenizerError when it has none (ids can still be run)."""
        ahead, self._tokenizer = self._tokenizer, None  # what failed is tried again
        return _tokenizer(self.source) if ahead is None else ahead.result()

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template; raises TemplateError when there is none (raw completion works)."""
        from .text.chat import ChatTemplate

        return self._given_template or ChatTemplate.from_source(self.source)

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template; one that does not compile is there too."""
        from .text.chat import find_templates

        return self._given_template is not None or bool(find_templates(self.source)[0])

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a text: those of generation_config, config and the tokenizer."""
        from .text.tokenizer import stop_set

        return stop_set(self.generation_config, self.config.eos_token_ids, self._tokenizer_if_any)

    @cached_property
    def _tokenizer_if_any(self) -> Tokenizer | None:
        try:
            return self.tokenizer
        except TokenizerError:
            return None

    # -- running it ----------------------------------------------------------------------------

    def logits(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """One forward pass from an empty context: float32 [len(ids), vocab_size].

        Row i holds the scores of the token after ``ids[i]``. ``len(ids)`` may be ctx_size.
        """
        self.session.check()
        checked = check_ids(ids, self.config.vocab_size)
        if len(checked) > self.ctx_size:
            check_fits(len(checked), self.ctx_size, self._limit, answer=False)
        with self._turn():
            return self.session.prompt(checked, reuse=False, all_logits=True)

    def stream(
        self,
        prompt: Prompt,
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reuse: bool = True,
        **sampling: Any,
    ) -> Generator[Chunk, None, None]:
        """Run a prompt and yield a `Chunk` for every token as it is sampled.

        prompt: a str is completed as it is (the tokenizer's special tokens are added); a list of
        ids is run as it is; a list of ``{"role": ..., "content": ...}`` messages is rendered by the
        chat template. thinking: passed to the template as ``enable_thinking`` unless None.
        reuse: keep what the K/V already holds of the prompt; with False everything is computed
        anew, and float32 rounding is that of a fresh process too.
        sampling: the fields of `SamplingParams` (``max_tokens``, ``temperature``, ``stop``, ...); a
        value that is not given comes from the model's generation_config, else is the default.

        Everything about the call is checked before this returns; the model is busy from the first
        ``next`` until the stream ends, is closed, or is dropped. Abandoning it leaves the model
        ready for the next call.
        """
        self.session.check()
        timings = Timings(load_s=self.load_s)
        started = time.perf_counter()
        ids, plan = self._prepare(prompt, thinking, tools, chat_template_kwargs)
        if thinking is None and "enable_thinking" in (chat_template_kwargs or {}):
            thinking = bool((chat_template_kwargs or {})["enable_thinking"])
        chosen = self.thinks(thinking) if plan.split_thinking else None
        params = self.sampling_params(chosen, **sampling)
        if params.stop and plan.tokenizer is None:
            raise TokenizerError(
                f"{self.name} has no tokenizer, so stop strings cannot be found in its output; use "
                "stop_token_ids"
            )
        job = make_job(
            self.session.engine,
            ids,
            params,
            limit=self._limit,
            plan=plan,
            eos_ids=self.eos_ids,
            reuse=reuse,
            timings=timings,
            started=started,
        )
        return self._in_turn(job)

    def _in_turn(self, job: Job) -> Generator[Chunk, None, None]:
        with self._turn():
            yield from run(self.session, job, self._turn.resume)

    def generate(
        self,
        prompt: Prompt,
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reuse: bool = True,
        **sampling: Any,
    ) -> Generation:
        """Run a prompt to its end; everything as in `stream`.

        sampling: max_tokens (None or -1: no limit), temperature, top_p, top_k, min_p, stop,
        stop_token_ids, seed, logit_bias, logprobs, top_logprobs, presence_penalty,
        frequency_penalty, repetition_penalty, min_tokens, ignore_eos.
        """
        return Generation.of(
            self.stream(
                prompt,
                thinking=thinking,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                reuse=reuse,
                **sampling,
            )
        )

    def count_tokens(self, prompt: Prompt) -> int:
        """How many positions ``prompt`` takes; of messages without the beginning of an answer."""
        if isinstance(prompt, str):
            return len(self.tokenizer.encode(prompt))
        if len(prompt) and isinstance(prompt[0], Mapping):
            messages: Any = list(prompt)
            text = self.chat_template.render(messages, add_generation_prompt=False)
            return len(self.tokenizer.encode(text, add_special_tokens=False))
        return len(prompt)

    def thinks(self, wanted: bool | None = None) -> bool | None:
        """Whether a chat would think: None when the template has no such switch."""
        if not self.has_chat_template or not self.chat_template.supports_thinking:
            return None
        return True if wanted is None else bool(wanted)  # Qwen3's templates think by default

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of ``messages``, up to where the answer begins."""
        kwargs = dict(chat_template_kwargs or {})
        taken = kwargs.keys() & {"messages", "tools", "add_generation_prompt"}
        if taken:
            raise UsageError(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}")
        if thinking is not None:
            kwargs["enable_thinking"] = thinking
        return self.chat_template.render(
            list(messages), tools=tools, add_generation_prompt=True, **kwargs
        )

    def sampling_params(self, thinking: bool | None = None, **given: Any) -> SamplingParams:
        """The sampling values of a call: given, else generation_config's, else the defaults.

        thinking: whether the model is to think, None when there is no such choice.
        """
        from .sampling import SamplingParams, defaults

        names = [field.name for field in fields(SamplingParams)]
        for name in given:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise UsageError(
                    f"{name!r} is no sampling value{hint}; there are {', '.join(names)}"
                )
        values = defaults(self.generation_config, thinking, given)
        if values.get("max_tokens") == -1 and not isinstance(values["max_tokens"], bool):
            values["max_tokens"] = None  # llama.cpp's and Ollama's way to say "no limit"
        if values.get("max_tokens") is not None:
            values["max_tokens"] = parse_count(values["max_tokens"], "max_tokens")
        return SamplingParams(**values)

    def _prepare(
        self,
        prompt: Prompt,
        thinking: bool | None,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[list[int], TextPlan]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            return check_ids(ids, self.config.vocab_size), TextPlan(self.tokenizer)
        if isinstance(prompt, bytes) or not isinstance(prompt, (Sequence, np.ndarray)):
            raise UsageError(
                f"a prompt is a str, a list of token ids or a list of chat messages, got "
                f"{type(prompt).__name__}"
            )
        if len(prompt) and isinstance(prompt[0], Mapping):
            from .text.chat import opens_thinking

            text = self.render(
                prompt,  # type: ignore[arg-type]
                thinking=thinking,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            plan = TextPlan(self.tokenizer, True, opens_thinking(text))
            return check_ids(ids, self.config.vocab_size), plan
        ids = check_ids(prompt, self.config.vocab_size)  # type: ignore[arg-type]
        return ids, TextPlan(self._tokenizer_if_any)

    # -- its end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory. Idempotent; an open stream ends with an error at its next step."""
        self.session.close()
        if self._blas is not None:
            self._blas.release()

    def __enter__(self) -> Model:
        self.session.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else str(self.engine)
        return f"<pykestrel.Model {self.name} {self.quant}, {state}>"
