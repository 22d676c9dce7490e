"""Rotary position embedding: the frequencies of `rope_type` and the tables of cos and sin.

The formulas are those of transformers' ``modeling_rope_utils`` (default, linear, llama3, yarn); for
yarn see https://arxiv.org/abs/2309.00071. Pairs are half-split ("rotate_half"): element i of a head
turns with element ``i + head_dim / 2`` by the angle ``position * inv_freq[i]``.

Frequencies and angles are rounded to float32, as transformers has them: at position 100,000 a
table made in float64 throughout would differ by more than the weights' own rounding.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig, RopeConfig
from .errors import ModelError

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]


def rope_table(config: ModelConfig, ctx_size: int, start: int = 0) -> tuple[F32, F32]:
    """cos and sin, float32 ``[ctx_size - start, head_dim / 2]``, of positions ``start`` on.

    yarn's attention factor is multiplied into both, as transformers does (so it scales q and k).
    """
    inv_freq, attention_factor = rope_frequencies(config)
    positions = np.arange(start, ctx_size, dtype=np.float32)
    angles = (positions[:, None] * inv_freq).astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    # transformers multiplies float32 by a Python float: round first, then scale, then round.
    factor = np.float32(attention_factor)
    return cos.astype(np.float32) * factor, sin.astype(np.float32) * factor


def rope_frequencies(config: ModelConfig) -> tuple[F32, float]:
    """inv_freq float32 ``[head_dim / 2]`` (radians a position) and the attention factor."""
    rope, dim = config.rope, config.head_dim
    if dim < 2 or dim % 2:
        raise ModelError(f"head_dim is {dim}, but rotary embedding needs an even number")
    if not (math.isfinite(rope.rope_theta) and rope.rope_theta > 0):
        raise ModelError(f"rope_theta is {rope.rope_theta}, but must be a positive number")
    inv_freq = 1.0 / rope.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    attention_factor = 1.0
    if rope.rope_type == "linear":
        inv_freq = inv_freq / _factor(rope)
    elif rope.rope_type == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.rope_type == "yarn":
        inv_freq = _yarn(inv_freq, rope, dim)
        attention_factor = _yarn_attention_factor(rope)
    elif rope.rope_type != "default":
        raise ModelError(
            f"rope_type {rope.rope_type!r} is not supported; pykestrel knows default, linear, "
            "llama3 and yarn"
        )
    return inv_freq.astype(np.float32), attention_factor


def _llama3(inv_freq: F64, rope: RopeConfig) -> F64:
    """Long wavelengths are slowed down by `factor`, short ones kept, those between blended."""
    factor = _factor(rope)
    original = _required(rope, "original_max_position_embeddings")
    low = _required(rope, "low_freq_factor")
    high = _required(rope, "high_freq_factor")
    if high == low:
        raise ModelError(
            f"rope_type 'llama3' has low_freq_factor equal to high_freq_factor ({low:g}), "
            "but they must differ"
        )
    turns = original * inv_freq / (2 * math.pi)  # [head_dim / 2], in the original context
    smooth = (turns - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    return np.where(turns < low, inv_freq / factor, np.where(turns > high, inv_freq, blended))


def _yarn(inv_freq: F64, rope: RopeConfig, dim: int) -> F64:
    """Interpolated frequencies for slow dimensions, the original ones for fast ones, a ramp
    between the dimensions that turn `beta_slow` and `beta_fast` times in the original context."""
    factor = _factor(rope)
    original = _required(rope, "original_max_position_embeddings")

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers: a ramp of no width would divide by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _factor(rope)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _factor(rope: RopeConfig) -> float:
    if not (math.isfinite(rope.factor) and rope.factor > 0):
        raise ModelError(
            f"rope_type {rope.rope_type!r} has factor {rope.factor}, but it must be positive"
        )
    return rope.factor


def _required(rope: RopeConfig, key: str) -> float:
    value: float | None = getattr(rope, key)
    if value is None or not value > 0:
        raise ModelError(
            f"rope_type {rope.rope_type!r} needs {key}, a positive number, but the config has "
            f"{value}"
        )
    return float(value)
