"""Rotary tables against formulas written down independently, one frequency at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykestrel.config import ModelConfig, RopeConfig
from pykestrel.errors import ModelError
from pykestrel.rope import rope_frequencies, rope_table


def model(rope: RopeConfig, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        hidden_size=head_dim,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        vocab_size=8,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope=rope,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        layer_window=(None,),
        layer_is_moe=(False,),
    )


thetas = st.sampled_from([10000.0, 100000.0, 500000.0, 1e6, 5e6])
dims = st.sampled_from([2, 16, 64, 128])


@given(thetas, dims, st.integers(1, 300))
def test_default(theta: float, dim: int, positions: int) -> None:
    cos, sin = rope_table(model(RopeConfig("default", theta), dim), positions)
    assert cos.shape == sin.shape == (positions, dim // 2)
    assert cos.dtype == sin.dtype == np.float32
    for p in {0, positions // 2, positions - 1}:
        for i in range(dim // 2):
            angle = p / theta ** (2 * i / dim)
            assert cos[p, i] == pytest.approx(math.cos(angle), abs=2e-5)
            assert sin[p, i] == pytest.approx(math.sin(angle), abs=2e-5)


@given(thetas, st.floats(1, 32))
def test_linear_stretches_positions(theta: float, factor: float) -> None:
    plain, _ = rope_frequencies(model(RopeConfig("default", theta)))
    scaled, attention = rope_frequencies(model(RopeConfig("linear", theta, factor=factor)))
    np.testing.assert_allclose(scaled, plain / factor, rtol=1e-6)
    assert attention == 1.0


def test_llama3_of_llama_3_1() -> None:
    """Wavelengths under 8192/4 are kept, above 8192/1 divided by 8, those between blended."""
    rope = RopeConfig(
        "llama3",
        500000.0,
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    got, attention = rope_frequencies(model(rope, 128))
    seen = set()
    for i in range(64):
        f = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            want, case = f, "kept"
        elif wavelength > 8192:
            want, case = f / 8, "divided"
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            want, case = (1 - share) * f / 8 + share * f, "blended"
        seen.add(case)
        assert got[i] == pytest.approx(want, rel=1e-6)
    assert seen == {"kept", "divided", "blended"}
    assert attention == 1.0


@given(thetas, st.sampled_from([64, 128]), st.floats(1, 40), st.booleans())
def test_yarn(theta: float, dim: int, factor: float, truncate: bool) -> None:
    rope = RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_position_embeddings=32768,
        truncate=truncate,
    )
    got, attention = rope_frequencies(model(rope, dim))
    # The (fractional) index of the frequency that turns so many times in the original context.
    low, high = (
        dim / (2 * math.log(theta)) * math.log(32768 / (2 * math.pi * turns)) for turns in (32, 1)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    for i in range(dim // 2):
        f = theta ** (-2 * i / dim)
        slow = min(1.0, max(0.0, (i - low) / (high - low)))
        assert got[i] == pytest.approx(f * (1 - slow) + f / factor * slow, rel=1e-5)
    assert attention == pytest.approx(0.1 * math.log(factor) + 1)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_attention_factor_is_folded_into_the_table(
    settings: dict[str, float], want: float
) -> None:
    rope = RopeConfig("yarn", 1e6, factor=4.0, original_max_position_embeddings=32768)
    config = model(replace(rope, **settings))  # type: ignore[arg-type]
    assert rope_frequencies(config)[1] == pytest.approx(want)
    cos, sin = rope_table(config, 50)
    np.testing.assert_allclose(np.hypot(cos, sin), want, rtol=1e-6)


def test_yarn_ramp_of_no_width() -> None:
    rope = RopeConfig(
        "yarn",
        10000.0,
        factor=2.0,
        original_max_position_embeddings=4096,
        beta_fast=1e9,
        beta_slow=1e9,
    )
    freqs, _ = rope_frequencies(model(rope))
    assert np.isfinite(freqs).all()


@given(st.integers(0, 500), st.integers(1, 100))
def test_a_table_from_a_later_start_is_the_tail_of_the_whole(start: int, count: int) -> None:
    config = model(RopeConfig("default", 1e6))
    whole = rope_table(config, start + count)
    tail = rope_table(config, start + count, start=start)
    for w, t in zip(whole, tail, strict=True):
        np.testing.assert_array_equal(w[start:], t)


def test_angles_are_those_of_float32_frequencies() -> None:
    """transformers multiplies a float32 frequency by the position; so far out it matters."""
    config = model(RopeConfig("default", 1e6), 128)
    inv_freq, _ = rope_frequencies(config)
    cos, _ = rope_table(config, 100_001, start=100_000)
    want = np.cos((np.float32(100_000) * inv_freq).astype(np.float64))
    np.testing.assert_allclose(cos[0], want, atol=1e-7)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (RopeConfig("dynamic", 1e4), "'dynamic' is not supported"),
        (RopeConfig("default", 0.0), "rope_theta"),
        (RopeConfig("default", float("nan")), "rope_theta"),
        (RopeConfig("linear", 1e4, factor=0.0), "factor"),
        (RopeConfig("llama3", 1e4, factor=8.0), "original_max_position_embeddings"),
        (
            RopeConfig("llama3", 1e4, factor=8.0, original_max_position_embeddings=8192),
            "low_freq_factor",
        ),
        (
            RopeConfig(
                "llama3",
                1e4,
                factor=8.0,
                original_max_position_embeddings=8192,
                low_freq_factor=2.0,
                high_freq_factor=2.0,
            ),
            "must differ",
        ),
        (RopeConfig("yarn", 1e4, factor=4.0), "original_max_position_embeddings"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(rope: RopeConfig, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        rope_frequencies(model(rope))


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(ModelError, match="head_dim is 33"):
        rope_frequencies(model(RopeConfig("default", 1e4), 33))
