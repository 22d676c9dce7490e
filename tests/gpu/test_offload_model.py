"""A real model of which a part is on a GPU: SmolLM2-135M, against the CPU engine.

Only on a real device; `tools/gpu_check.py` runs it where the demo model is at hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykestrel
from pykestrel.engine.cuda import device_need
from pykestrel.engine.offload import OffloadEngine
from pykestrel.loading import read_config, resolve_model

pytestmark = [pytest.mark.gpu, pytest.mark.model]

PROMPT = "The kestrel is a small falcon that"
TOKENS = 64
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
SETTINGS: dict[str, Any] = {"kv": "f16", "ctx_size": 512}


def weights(path: Path, quant: str) -> int:
    return device_need(read_config(resolve_model(path)), quant, 512, "f16").weights


@pytest.mark.parametrize("quant", ["q8", "q4"])
def test_verification_of_64_tokens_finds_nothing(
    demo_model: Path, quant: str, record_property: Callable[[str, object], None]
) -> None:
    budget = weights(demo_model, quant) - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pykestrel.load(
            demo_model, device="cuda", quant=quant, vram_budget=budget, min_flop=0, verify=True,
            **SETTINGS,
        ) as model:  # fmt: skip
            model.generate(model.tokenizer.encode(PROMPT), **GREEDY)
            stats = model.session.engine.stats()
    seen = f"{stats['verified']} products verified, {stats['verify_failures']} failures"
    print(f"{quant}: {seen}")
    record_property("verify", seen)
    # 63 passes of one token and one of the prompt; 4 products in each of 30 layers, and the head
    assert stats["verified"] >= TOKENS * (30 * 4 - 1)
    assert stats["verify_failures"] == 0


@pytest.mark.parametrize("mode", ["segments", "projections"])
@pytest.mark.parametrize("quant", ["q8", "q4"])
def test_the_text_is_the_cpus_whatever_fits(
    demo_model: Path, quant: str, mode: str, record_property: Callable[[str, object], None]
) -> None:
    """Token by token on the text that the CPU chose. Where the device would choose another, the CPU
    must have found the two nearer than the engines' logits are, at the median of the others."""
    with pykestrel.load(demo_model, device="cpu", quant=quant, **SETTINGS) as model:
        prompt = model.tokenizer.encode(PROMPT)
        ids = [*prompt, *model.generate(prompt, **GREEDY).tokens]
        want = model.logits(ids)[len(prompt) - 1 : -1]
    whole = weights(demo_model, quant)
    speeds = []
    for percent in (0, 25, 50, 75, 100):
        with pykestrel.load(
            demo_model, device="cuda", quant=quant, vram_budget=whole * percent // 100,
            offload=mode, **SETTINGS,
        ) as model:  # fmt: skip
            free = model.generate(prompt, **GREEDY)
            engine = model.session.engine
            engine.truncate(0)
            rows = [engine.forward(prompt)] + [engine.forward([i]) for i in ids[len(prompt) : -1]]
            if isinstance(engine, OffloadEngine):
                assert engine.stats()["evictions"] == 0
        got = np.array(rows)
        agree = got.argmax(axis=1) == want.argmax(axis=1)
        rounding = float(np.median(np.abs(got - want).max(axis=1)[agree]))
        chosen = ids[len(prompt) :]
        same = next((i for i in range(TOKENS) if free.tokens[i] != chosen[i]), TOKENS)
        speeds.append(round(free.timings.decode_tps, 1))
        print(
            f"{quant} {mode} {percent} %: {int(agree.sum())} of {TOKENS} agree, the first {same} "
            f"of a free run; median difference {rounding:.1e}; {speeds[-1]} tokens/s"
        )
        for i in np.flatnonzero(~agree):
            margin = float(want[i].max() - want[i, got[i].argmax()])
            print(f"  token {i}: nearer than {margin:.1e}")
            assert margin < rounding
    record_property("tokens a second at 0, 25, 50, 75, 100 %", speeds)
    assert speeds[-1] > speeds[0]
