"""A real model end to end: the greedy text of SmolLM2-135M-Instruct, and what q8 costs it.

The expected values were computed by transformers in float32 from the demo model's Q4_1 GGUF,
dequantised and rounded to bf16. ``mean_nll`` is that of every token of ids + greedy but the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykestrel

CASES = json.loads((Path(__file__).parent / "data" / "smollm2-135m-greedy.json").read_text())
NAMES = [f"{case['kind']}{i}" for i, case in enumerate(CASES)]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def bf16(demo_model: Path) -> Iterator[pykestrel.Model]:
    with pykestrel.load(demo_model, device="cpu", quant="bf16", kv="f32", ctx_size=512) as model:
        yield model


@pytest.fixture(scope="module")
def q8(demo_model: Path) -> Iterator[pykestrel.Model]:
    with pykestrel.load(demo_model, device="cpu", quant="q8", ctx_size=512) as model:
        yield model


def nll(model: pykestrel.Model, case: dict[str, Any]) -> np.ndarray:
    """-log p of every token of ids + greedy but the first: float64 [len - 1]."""
    ids = [*case["ids"], *case["greedy"]]
    logits = model.logits(ids)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -logp[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_greedy_text_at_bf16(bf16: pykestrel.Model, case: dict[str, Any]) -> None:
    expected = case["greedy"]
    prompt = case["messages"] if case["kind"] == "chat" else case["prompt"]
    if case["kind"] == "chat":
        assert bf16.render(prompt) == case["rendered"]
    assert (
        bf16.tokenizer.encode(case.get("rendered", prompt), add_special_tokens=False) == case["ids"]
    )
    out = bf16.generate(prompt, temperature=0, max_tokens=len(expected))
    assert out.tokens == expected
    assert bf16.tokenizer.decode(out.tokens) == case["text"]
    assert out.text == case["text"].removesuffix("<|im_end|>")
    assert out.finish_reason == ("stop" if case["text"].endswith("<|im_end|>") else "length")


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_first_logits_at_bf16(bf16: pykestrel.Model, case: dict[str, Any]) -> None:
    last = bf16.logits(case["ids"])[-1]
    expected = np.array(case["top_logits"])
    np.testing.assert_allclose(last[case["top_ids"]], expected, atol=2e-3)
    np.testing.assert_allclose(np.sort(last)[::-1][: len(expected)], expected, atol=2e-3)
    assert nll(bf16, case).mean() == pytest.approx(case["mean_nll"], rel=1e-4)


def test_q8_costs_less_than_two_percent(q8: pykestrel.Model) -> None:
    """Of the mean nll over ids + greedy, text by text, with the default int8 K/V."""
    for case, name in zip(CASES, NAMES, strict=True):
        got = nll(q8, case).mean()
        assert abs(got / case["mean_nll"] - 1) < 0.02, f"{name}: {got} for {case['mean_nll']}"
