"""`load`, `Model.generate`, `Model.stream`: limits, reuse of the K/V, threads, forks, the end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pykestrel
from pykestrel import ContextError, KestrelError, Model, TokenizerError, UsageError
from pykestrel.session import Session

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def model(tiny: Path) -> Iterator[Model]:
    """320 ids, context 512, no tokenizer."""
    with pykestrel.load(tiny, device="cpu", quant="bf16", kv="f32") as opened:
        yield opened


@pytest.fixture
def chat(tiny_chat: Path) -> Iterator[Model]:
    with pykestrel.load(tiny_chat, device="cpu", quant="bf16", kv="f32") as opened:
        yield opened


def greedy(model: Model, ids: list[int], n: int = 12) -> list[int]:
    return model.generate(ids, max_tokens=n, **GREEDY).tokens


# -- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "gpu"}, {"quant": "q5"}, {"kv": "int4"}, {"ctx_size": "lots"}, {"ctx_size": 1},
        {"ctx_size": 513}, {"ctx_size": -4}, {"cpu_cache": "much"}, {"ctx_size": 2.5},
    ],
)  # fmt: skip
def test_wrong_arguments_name_themselves(tiny: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        pykestrel.load(tiny, **wrong)


def test_what_a_model_says_of_itself(model: Model) -> None:
    assert model.engine.name == "cpu"
    assert model.engine.why in str(model.engine)
    assert (model.quant, model.kv, model.ctx_size, model.closed) == ("bf16", "f32", 512, False)
    assert model.traffic.token <= model.traffic.weights
    assert "llama-gqa3" in repr(model)


def test_counts_as_people_write_them(tiny: Path) -> None:
    with pykestrel.load(str(tiny), ctx_size="0.25k", cpu_cache="1MB") as model:
        assert model.ctx_size == 256
        assert len(model.generate([5], max_tokens="0.125k", **GREEDY).tokens) == 128


# -- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [5, -1],
        [5, 320],
        [1.5],
        [True],
        [None],
        b"abc",
        5,
        {"role": "user"},
        None,
        {5, 6},
        [[5]],
        np.zeros((2, 200), int),
        ["a" * 1000],
    ],
)
def test_what_is_no_prompt(model: Model, prompt: Any) -> None:
    with pytest.raises(UsageError) as caught:
        model.stream(prompt)  # at the call, not at the first token
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_ids_of_numpy_are_ids(model: Model) -> None:
    assert greedy(model, np.array([5, 6], np.int32)) == greedy(model, [5, 6])  # type: ignore[arg-type]


def test_text_needs_a_tokenizer_and_ids_do_not(model: Model) -> None:
    for prompt in ("text", [{"role": "user", "content": "text"}]):
        with pytest.raises(KestrelError, match=r"tokenizer|template"):
            model.generate(prompt)
    out = model.generate([5, 6], max_tokens=3, **GREEDY)
    assert (out.text, out.content, len(out.tokens)) == ("", "", 3)
    with pytest.raises(TokenizerError, match="stop_token_ids"):
        model.stream([5], stop=["x"])


def test_unknown_and_wrong_sampling_values(model: Model) -> None:
    for wrong in ({"temprature": 1}, {"top_p": 2}, {"max_tokens": "many"}, {"max_tokens": -2}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            model.stream([5], **wrong)


def test_str_ids_and_messages_agree(chat: Model) -> None:
    messages = [{"role": "user", "content": "hé"}]
    text = chat.render(messages)
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    outs = [chat.generate(p, max_tokens=9, **GREEDY) for p in (text, ids, messages)]
    assert outs[0].tokens == outs[1].tokens == outs[2].tokens
    assert outs[0].text == outs[1].text == outs[2].text != ""
    with pytest.raises(UsageError, match="messages"):
        chat.stream(messages, chat_template_kwargs={"messages": []})


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abc", [{"role": "user", "content": "abc"}]])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_and_its_generation_are_the_same(chat: Model, prompt: Any, seed: int) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 60, "thinking": True}
    chunks = list(chat.stream(prompt, **options))
    out = chat.generate(prompt, **options)
    assert "".join(c.text for c in chunks) == out.text
    assert "".join(c.content for c in chunks) == out.content
    assert ("".join(c.reasoning_content for c in chunks) or None) == out.reasoning_content
    assert [c.token for c in chunks] == out.tokens
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == out.finish_reason in ("stop", "length")
    visible = out.tokens[:-1] if out.finish_reason == "stop" else out.tokens
    assert out.text == chat.tokenizer.decode(visible, skip_special_tokens=True)


def test_thinking_goes_its_own_way(chat: Model) -> None:
    messages = [{"role": "user", "content": "abc"}]
    ids = chat.tokenizer.encode("</think>\n\nyes")
    bias = {"logit_bias": {}}
    thought = chat.generate(messages, thinking=True, max_tokens=6, **GREEDY, **bias)
    assert thought.content == ""
    assert thought.reasoning_content
    plain = chat.generate(messages, thinking=False, max_tokens=6, **GREEDY)
    assert plain.reasoning_content is None
    assert plain.content == plain.text
    assert ids[0] == 303


def test_stop_strings(chat: Model) -> None:
    text = chat.generate("abc", max_tokens=80, seed=3, temperature=1).text
    for start in range(4, len(text) - 8, 9):
        stop = text[start : start + 3]
        chunks = list(chat.stream("abc", max_tokens=80, seed=3, temperature=1, stop=[stop, "\0\0"]))
        assert "".join(c.text for c in chunks) == text[: text.index(stop)]
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)


def test_stop_ids_and_eos(model: Model) -> None:
    tokens = greedy(model, [5, 6, 7], 12)
    stop = tokens[6]
    out = model.generate([5, 6, 7], max_tokens=12, stop_token_ids=[stop], **GREEDY)
    assert out.tokens == tokens[: tokens.index(stop) + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    held = model.generate([5, 6, 7], max_tokens=12, stop_token_ids=[stop], min_tokens=12, **GREEDY)
    assert stop not in held.tokens[:11]
    assert len(held.tokens) == 12
    forced = {"logit_bias": {1: 100}, "temperature": 0, "max_tokens": 4}
    assert model.generate([5], **forced).tokens == [1]  # config.json's eos
    assert model.generate([5], **forced, ignore_eos=True).tokens == [1] * 4


def test_logprobs(model: Model) -> None:
    out = model.generate([5, 6], max_tokens=4, logprobs=3, **GREEDY)
    assert out.logprobs is not None
    assert out.top_logprobs is not None
    assert len(out.logprobs) == len(out.top_logprobs) == 4
    for token, logprob, top in zip(out.tokens, out.logprobs, out.top_logprobs, strict=True):
        assert top[0][0] == token  # greedy
        assert top[0][1] == pytest.approx(logprob, abs=1e-5)
    assert model.generate([5, 6], max_tokens=4, **GREEDY).logprobs is None


def test_timings(model: Model) -> None:
    first = model.generate([5, 6, 7, 8], max_tokens=5, **GREEDY).timings
    assert (first.prompt_tokens, first.reused_tokens, first.decode_tokens) == (4, 0, 4)
    assert first.prompt_tps > 0
    assert first.decode_tps > 0
    assert first.load_s > 0
    assert first.ttft_s >= first.prompt_s
    again = model.generate([5, 6, 7, 8], max_tokens=5, **GREEDY).timings
    assert again.reused_tokens == 3


# -- the limit of the context ---------------------------------------------------------------------


@pytest.mark.parametrize("ctx", [2, 33, 100])
def test_the_edges_of_the_context(tiny: Path, ctx: int) -> None:
    with pykestrel.load(tiny, ctx_size=ctx) as model:
        out = model.generate([5] * (ctx - 1), **GREEDY)
        assert (len(out.tokens), out.finish_reason) == (1, "length")
        with pytest.raises(ContextError, match=rf"{ctx} tokens.*holds {ctx}"):
            model.stream([5] * ctx)
        out = model.generate([5], **GREEDY)
        assert (len(out.tokens), out.finish_reason) == (ctx - 1, "length")
        assert model.logits([5] * ctx).shape == (ctx, 320)
        with pytest.raises(ContextError):
            model.logits([5] * (ctx + 1))


def test_no_tokens_at_all(model: Model) -> None:
    out = model.generate([5], max_tokens=0)
    assert (out.tokens, out.text, out.finish_reason) == ([], "", "length")


# -- one sequence, used again ---------------------------------------------------------------------


def test_a_then_b_then_a_is_a_fresh_process(tiny: Path) -> None:
    a, b = [5, 6, 7, 8, 9], [5, 6, 40, 41]
    fresh = {}
    for name, ids in (("a", a), ("b", b)):
        with pykestrel.load(tiny, quant="q8") as model:
            fresh[name] = greedy(model, ids)
    with pykestrel.load(tiny, quant="q8") as model:
        assert greedy(model, a) == fresh["a"]
        assert greedy(model, b) == fresh["b"]
        assert greedy(model, a) == fresh["a"]
        model.logits([7] * 50)
        assert greedy(model, a) == fresh["a"]
        # a conversation: what was generated is part of the next prompt
        assert model.generate(a, max_tokens=1, reuse=False).timings.reused_tokens == 0
        longer = [*a, *fresh["a"], 44]
        reused = greedy(model, longer)
        assert (
            model.generate(longer, max_tokens=1, **GREEDY).timings.reused_tokens >= len(longer) - 1
        )
    with pykestrel.load(tiny, quant="q8") as model:
        assert greedy(model, longer) == reused


def test_logits_start_from_an_empty_context(model: Model) -> None:
    before = model.logits([5, 6, 7])
    assert before.shape == (3, 320)
    assert before.dtype == np.float32
    greedy(model, [5, 6, 7, 8])
    np.testing.assert_array_equal(model.logits([5, 6, 7]), before)


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=6), min_size=1, max_size=6))
def test_the_session_holds_what_it_says(prompts: list[list[int]]) -> None:
    """Against an engine that checks what it is told: K/V and ids never part."""
    engine = EngineOfIds()
    session = Session(engine)
    for ids in prompts:
        kept = session.shared_prefix(ids)
        assert session.prompt(ids)[0] == sum(ids)
        assert session.seen == engine.held == ids
        assert kept < len(ids)
        session.extend([7])
        assert session.seen == engine.held == [*ids, 7]


class EngineOfIds:
    """An engine whose K/V is the ids; fails before or after it has taken them, when told to."""

    name = "test"
    ctx_size = 64
    vocab_size = 8

    def __init__(self) -> None:
        self.held: list[int] = []
        self.fail: str | None = None

    @property
    def position(self) -> int:
        return len(self.held)

    def forward(self, ids: Any, *, all_logits: bool = False) -> Any:
        if self.fail == "before":
            raise KeyboardInterrupt
        self.held.extend(ids)
        if self.fail == "after":
            raise KeyboardInterrupt
        return np.full(8, sum(self.held), np.float32)

    def truncate(self, position: int) -> None:
        assert 0 <= position <= len(self.held)
        del self.held[position:]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_the_session_sound(when: str) -> None:
    engine = EngineOfIds()
    session = Session(engine)
    session.prompt([1, 2, 3])
    engine.fail = when
    for action in (lambda: session.prompt([1, 2, 4, 5]), lambda: session.extend([6])):
        with pytest.raises(KeyboardInterrupt):
            action()
    engine.fail = None
    session.extend([6])
    assert session.seen == engine.held == [1, 2, 6]
    session.prompt([1, 2, 4])
    assert session.seen == engine.held == [1, 2, 4]


# -- abandoning, threads, forks, the end ----------------------------------------------------------


def test_a_stream_may_be_dropped(model: Model) -> None:
    expected = greedy(model, [5, 6])
    for chunk in model.stream([5, 6], **GREEDY):
        if chunk.token == expected[3]:
            break
    assert greedy(model, [5, 6]) == expected
    stream = model.stream([5, 6], **GREEDY)
    next(stream)
    stream.close()
    assert greedy(model, [5, 6]) == expected
    model.stream([5, 6])  # never begun: holds nothing
    assert greedy(model, [5, 6]) == expected


def test_a_call_while_this_thread_has_a_stream_open_is_refused(model: Model) -> None:
    stream = model.stream([5, 6], max_tokens=4, **GREEDY)
    next(stream)
    for call in (lambda: model.generate([5]), lambda: model.logits([5])):
        with pytest.raises(KestrelError, match="busy"):
            call()
    assert len(list(stream)) == 3
    model.logits([5])


def test_threads_take_turns(model: Model) -> None:
    prompts = [[5, 6], [7, 8, 9], [5, 6, 7], [40]]
    expected = [greedy(model, p, 20) for p in prompts]
    results: list[list[int] | None] = [None] * len(prompts)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(3):
                results[i] = greedy(model, prompts[i], 20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert results == expected


def test_a_stream_may_be_read_by_several_threads(model: Model) -> None:
    expected = greedy(model, [5, 6], 8)
    stream = model.stream([5, 6], max_tokens=8, **GREEDY)
    tokens = []
    for _ in range(8):
        thread = threading.Thread(target=lambda: tokens.append(next(stream).token))
        thread.start()
        thread.join(30)
    assert tokens == expected
    stream.close()
    assert greedy(model, [5, 6], 8) == expected


def test_after_the_end(tiny: Path) -> None:
    model = pykestrel.load(tiny)
    stream = model.stream([5, 6], **GREEDY)
    next(stream)
    model.close()
    model.close()
    assert model.closed
    with pytest.raises(KestrelError, match="closed"):
        next(stream)
    for call in (
        lambda: model.generate([5]),
        lambda: model.stream([5]),
        lambda: model.logits([5]),
        model.__enter__,
    ):
        with pytest.raises(KestrelError, match="closed"):
            call()


def test_closing_while_another_thread_runs(tiny: Path) -> None:
    model = pykestrel.load(tiny)
    begun, ended = threading.Event(), []

    def work() -> None:
        try:
            for _ in model.stream([5], **GREEDY):
                begun.set()
        except KestrelError as error:
            ended.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    model.close()
    thread.join(30)
    assert not thread.is_alive()
    assert all("closed" in text for text in ended)  # or it had come to its end before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told(model: Model) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            words = "no error"
            try:
                model.generate([5], max_tokens=2)
            except KestrelError as error:
                words = str(error)
            model.close()  # must not touch what belongs to the parent
            os.write(write, words.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        words = pipe.read()
    os.waitpid(child, 0)
    assert f"process {os.getpid()}" in words
    assert "fork" in words
    assert len(greedy(model, [5], 3)) == 3


def test_nothing_is_printed_when_the_interpreter_ends(tiny: Path, env: dict[str, str]) -> None:
    import subprocess

    code = (
        "import sys, pykestrel\n"
        "model = pykestrel.load(sys.argv[1])\n"
        "stream = model.stream([5, 6])\nnext(stream)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny)], env=env, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
