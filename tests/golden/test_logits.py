"""The CPU engine against logits that transformers computed, for every family and layout.

Five of the cases (rope types, windows, biases, mixed and fused experts) are made by
tools/golden.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pykestrel.engine.cpu import CpuEngine
from pykestrel.loading import load_weights, resolve_model

DATA = Path(__file__).parent / "data"
CASES = sorted(path.parent.name for path in DATA.glob("*/golden.safetensors"))
TOLERANCE = 2e-3  # the logits have a standard deviation of 8 to 13


def make_engine(case: str, ctx_size: int = 64) -> CpuEngine:
    weights = load_weights(resolve_model(DATA / case), "bf16")
    return CpuEngine(weights, ctx_size=ctx_size, kv="f32")


def golden(case: str) -> tuple[list[int], NDArray[np.float32], list[int]]:
    tensors = load_file(DATA / case / "golden.safetensors")
    return tensors["input_ids"].tolist(), tensors["logits"], tensors["greedy"].tolist()


def report(got: NDArray[np.float32], want: NDArray[np.float32], tolerance: float) -> str:
    error = np.abs(got - want)
    where = np.unravel_index(int(error.argmax()), error.shape)
    worst = float(error.max())
    return (
        f"max abs error {worst:.3e} at {tuple(map(int, where))}, {worst / tolerance:.0%} of the "
        f"tolerance {tolerance:g}; relative to the largest logit "
        f"{worst / float(np.abs(want).max()):.3e}"
    )


def test_all_families_are_there() -> None:
    assert len(CASES) == 11


@pytest.mark.parametrize("case", CASES)
def test_one_pass_gives_the_golden_logits(case: str) -> None:
    ids, want, _ = golden(case)
    engine = make_engine(case)
    got = engine.forward(ids, all_logits=True)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= TOLERANCE, report(got, want, TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_token_by_token_gives_the_same_logits(case: str) -> None:
    ids, want, _ = golden(case)
    whole = make_engine(case).forward(ids, all_logits=True)
    engine = make_engine(case)
    steps = np.stack([engine.forward([token]) for token in ids])
    assert engine.position == len(ids)
    tolerance = 1e-4 * float(np.abs(whole).max())
    assert np.abs(steps - whole).max() <= tolerance, report(steps, whole, tolerance)
    assert np.abs(steps - want).max() <= TOLERANCE, report(steps, want, TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_repeats_the_golden_continuation(case: str) -> None:
    ids, _, greedy = golden(case)
    engine = make_engine(case)
    logits = engine.forward(ids)
    out: list[int] = []
    for _ in greedy:
        out.append(int(logits.argmax()))
        logits = engine.forward(out[-1:])
    assert out == greedy
