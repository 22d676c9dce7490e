"""A real model on a GPU: 256 greedy tokens of SmolLM2-135M, against the CPU engine.

Only on a real device; `tools/gpu_check.py` runs it where the demo model is at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pykestrel

pytestmark = [pytest.mark.gpu, pytest.mark.model]

PROMPT = "The kestrel is a small falcon that"
TOKENS = 256


@pytest.mark.parametrize("kv", ["int8", "f16"])
@pytest.mark.parametrize("quant", ["q8", "q4"])
def test_256_greedy_tokens_are_those_of_the_cpu(
    demo_model: Path, quant: str, kv: str, record_property: Callable[[str, object], None]
) -> None:
    """Token by token on the text that the CPU chose. Where the device would choose another, the CPU
    must have found the two nearly equal: nearer than the engines' logits are, at the median of the
    positions where they agree."""
    with pykestrel.load(demo_model, device="cpu", quant=quant, kv=kv, ctx_size=512) as model:
        prompt = model.tokenizer.encode(PROMPT)
        made = model.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True)
        ids = [*prompt, *made.tokens]
        want = model.logits(ids)[len(prompt) - 1 : -1]
    with pykestrel.load(demo_model, device="cuda", quant=quant, kv=kv, ctx_size=512) as model:
        assert model.engine.name == "cuda"
        got = model.logits(ids)[len(prompt) - 1 : -1]
        free = model.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True).tokens
    assert len(made.tokens) == TOKENS
    agree = got.argmax(axis=1) == want.argmax(axis=1)
    rounding = float(np.median(np.abs(got - want).max(axis=1)[agree]))
    largest = float(np.abs(want).max())
    same = next((i for i in range(TOKENS) if free[i] != made.tokens[i]), TOKENS)
    print(
        f"{quant} {kv}: {int(agree.sum())} of {TOKENS} agree, the first {same} of a free run; "
        f"median difference {rounding:.2e}, largest logit {largest:.1f}"
    )
    record_property("greedy", f"{int(agree.sum())}/{TOKENS}, free run {same}")
    for i in np.flatnonzero(~agree):
        ours, theirs = int(got[i].argmax()), int(want[i].argmax())
        margin = float(want[i, theirs] - want[i, ours])
        print(f"  token {i}: the CPU prefers {theirs} to {ours} by {margin:.2e}")
        assert margin < rounding
    assert rounding < 0.01 * largest


@pytest.fixture(scope="module")
def long_text() -> str:
    """More than 4,000 tokens of English prose and tables."""
    docs = Path(__file__).parents[2] / "docs"
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(docs.glob("*.md")))


@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_a_prompt_at_once_goes_on_as_token_by_token(
    demo_model: Path, long_text: str, kv: str, record_property: Callable[[str, object], None]
) -> None:
    """The 64 greedy tokens after prompts of awkward lengths, at q8. With int8 K/V a code may fall
    to its neighbour: then a different choice must be one between two tokens that were nearer than
    the logits of both ways are, at the median of the positions where they agree."""
    with pykestrel.load(demo_model, device="cuda", quant="q8", kv=kv, ctx_size=4200) as model:
        engine = model.session.engine
        ids = model.tokenizer.encode(long_text)
        for length in (1, 31, 32, 33, 1000, 4000):
            prompt = ids[:length]
            engine.truncate(0)
            for token in prompt[:-1]:
                engine.forward([token])
            rows = [engine.forward(prompt[-1:])]
            single = [int(rows[0].argmax())]
            while len(single) < 64:
                rows.append(engine.forward(single[-1:]))
                single.append(int(rows[-1].argmax()))
            engine.truncate(0)
            whole = [engine.forward(prompt)]
            for token in single[:-1]:
                whole.append(engine.forward([token]))
            got, want = np.stack(whole), np.stack(rows)
            agree = got.argmax(axis=1) == want.argmax(axis=1)
            rounding = float(np.median(np.abs(got - want).max(axis=1)[agree]))
            print(
                f"{kv}, {length} tokens: {int(agree.sum())} of 64 agree, differ by {rounding:.1e}"
            )
            record_property(f"prompt {length}", f"{int(agree.sum())}/64, {rounding:.1e}")
            for i in np.flatnonzero(~agree):
                margin = float(want[i].max() - want[i, int(got[i].argmax())])
                print(f"  token {i}: nearer than {margin:.1e}")
                assert kv == "int8"
                assert margin < rounding
