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
