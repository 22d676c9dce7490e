"""`load` and `Model`: threads of BLAS, wrong arguments, and what the API says of itself."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pykestrel
from pykestrel import ContextError, KestrelError, Model, UsageError, machine, session, threads
from pykestrel import model as model_module
from pykestrel.errors import TokenizerError
from pykestrel.text.tokenizer import Tokenizer

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def model(tiny: Path) -> Iterator[Model]:
    """320 ids, context 512, no tokenizer."""
    with pykestrel.load(tiny, device="cpu", quant="bf16", kv="f32") as opened:
        yield opened


def blas_threads() -> int | None:
    return machine.numpy_blas()["blas"].get("threads")


def test_threads_hold_while_the_model_lives(tiny: Path) -> None:
    pytest.importorskip("threadpoolctl")
    before = blas_threads()
    one = pykestrel.load(tiny, threads=1)
    assert (one.threads, blas_threads()) == (1, 1)
    two = pykestrel.load(tiny, threads=2)
    one.close()
    assert blas_threads() == 2  # the newest of those that live
    two.close()
    two.close()
    assert blas_threads() == before
    with pytest.raises(UsageError, match="threads"):
        pykestrel.load(tiny, threads=0)
    with pytest.raises(KestrelError):
        pykestrel.load(tiny / "nowhere", threads=1)
    assert blas_threads() == before


def test_threads_without_threadpoolctl(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with pytest.raises(KestrelError, match=r"pip install \"pykestrel\[cpu\]\""):
        pykestrel.load(tiny, threads=1)
    monkeypatch.setattr(threads, "_from_start", 1)  # as the command line does it
    with pykestrel.load(tiny, threads=1) as model:
        assert model.generate([5, 6], max_tokens=2, **GREEDY).tokens


def test_the_tokenizer_is_read_while_the_weights_are(
    tiny_chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()
    read, open_engine = Tokenizer.from_source, model_module.open_engine

    def reading(source: Any) -> Tokenizer:
        began.set()
        return read(source)

    def opening(*given: Any) -> Any:
        assert began.wait(timeout=60)
        return open_engine(*given)

    monkeypatch.setattr(Tokenizer, "from_source", reading)
    monkeypatch.setattr(model_module, "open_engine", opening)
    with pykestrel.load(tiny_chat, device="cpu") as model:
        began.clear()
        assert model.tokenizer is model.tokenizer
        assert model.tokenizer.encode("hello")
    assert not began.is_set()  # not a second time


def test_a_tokenizer_that_fails_is_not_missed_before_it_is_needed(
    tiny_chat: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_chat, tmp_path / "copy")
    whole = (copy / "tokenizer.json").read_bytes()
    (copy / "tokenizer.json").write_bytes(whole[:-9])
    with pykestrel.load(copy, device="cpu") as model:
        for _ in range(2):
            with pytest.raises(TokenizerError, match=r"tokenizer\.json is not valid JSON"):
                _ = model.tokenizer
        (copy / "tokenizer.json").write_bytes(whole)  # what was damaged may be mended
        assert model.tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"vram_budget": "4GB", "device": "cpu"}, "it cannot be had with device='cpu'"),
        ({"vram_budget": "much"}, "vram_budget must be a byte size"),
        ({"host_budget": -1}, "host_budget must not be negative"),
        ({"min_flop": float("nan")}, "min_flop must be 0 or more and finite, got nan"),
        ({"min_flop": float("inf")}, "min_flop must be 0 or more and finite, got inf"),
        ({"min_flop": -1}, "min_flop must be 0 or more and finite, got -1"),
        ({"min_flop": "1e7"}, "min_flop must be a number of operations"),
        ({"offload": "some"}, "offload must be one of segments, projections"),
    ],
)
def test_wrong_settings_of_a_part(tiny: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        pykestrel.load(tiny, **given)


@pytest.mark.parametrize("wrong", [5, None, 1.5])
def test_what_is_no_path(tiny: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match="the model must be"):
        pykestrel.load(wrong)
    if wrong is not None:
        with pytest.raises(UsageError, match="chat_template must be"):
            pykestrel.load(tiny, chat_template=wrong)


def test_no_limit_by_either_name(model: Model) -> None:
    for limit in (-1, None):
        made = model.generate([5] * 500, max_tokens=limit, **GREEDY)
        assert (len(made.tokens), made.finish_reason) == (12, "length")


def test_logits_beyond_the_context_are_no_answer(model: Model) -> None:
    with pytest.raises(ContextError, match="has 513 tokens and the context holds 512: shorten"):
        model.logits([5] * 513)


def test_public_names_only() -> None:
    assert dir(pykestrel) == sorted(pykestrel.__all__)
    assert "max_tokens" in str(Model.generate.__doc__)


def test_a_stream_that_a_thread_left_behind_is_an_error_not_a_wait(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_PATIENCE", 0.05)
    stream = model.stream([5, 6], max_tokens=50, **GREEDY)
    thread = threading.Thread(target=lambda: next(stream))
    thread.start()
    thread.join()
    with pytest.raises(KestrelError, match="a thread that has ended"):
        model.generate([5], max_tokens=1)
    stream.close()
    assert model.generate([5], max_tokens=1, **GREEDY).tokens
