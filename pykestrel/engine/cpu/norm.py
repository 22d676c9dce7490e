"""RMSNorm, SwiGLU and rotary embedding on float32 rows, into buffers that the caller owns."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]


def rms_norm(x: F32, weight: F32, eps: float, out: F32) -> bool:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` over the last axis of ``x [M, H]``.

    Returns whether every mean square is finite: the sum over a row is the one place where a NaN or
    an infinity anywhere in it shows for free.
    """
    if len(x) == 1:
        row = x[0]
        mean = float(np.dot(row, row)) / row.size
        np.multiply(x, np.float32(1.0 / (mean + eps) ** 0.5), out=out)
        np.multiply(out, weight, out=out)
        return math.isfinite(mean)
    means = np.einsum("...h,...h->...", x, x) / np.float32(x.shape[-1])
    factor = np.float32(1) / np.sqrt(means + np.float32(eps))
    np.multiply(x, factor[..., None], out=out)
    np.multiply(out, weight, out=out)
    return bool(np.isfinite(means).all())


def head_norm(x: F32, weight: F32, eps: float, square: F32) -> None:
    """RMSNorm over ``head_dim`` of ``x [M, heads, head_dim]`` in place; ``weight [heads,
    head_dim]`` (q and k have their own), ``square`` is scratch of x's shape.

    A head whose mean square overflows becomes NaN: divided by infinity it would be zeros, and
    nobody would find what is wrong.
    """
    np.multiply(x, x, out=square)
    means = np.add.reduce(square, axis=-1, keepdims=True)
    if not math.isfinite(float(np.add.reduce(means, axis=None))):
        means[np.isinf(means)] = np.nan
    means /= np.float32(x.shape[-1])
    means += np.float32(eps)
    np.sqrt(means, out=means)
    np.divide(x, means, out=x)
    np.multiply(x, weight, out=x)


def silu_times(gate: F32, up: F32, out: F32) -> None:
    """``out = gate / (1 + exp(-gate)) * up``; exp overflows to infinity where silu is 0."""
    np.negative(gate, out=out)
    np.exp(out, out=out)
    out += np.float32(1)
    np.divide(gate, out, out=out)
    out *= up


def rotate(x: F32, cos: F32, sin: F32, turned: F32) -> None:
    """Rotate ``x [M, heads, 2, head_dim / 2]`` in place, half-split: ``(a, b)`` becomes
    ``(a cos - b sin, b cos + a sin)``.

    ``cos [M, 1, 1, head_dim / 2]``; ``sin [M, 1, 2, head_dim / 2]`` is ``(-sin, sin)``;
    ``turned`` is scratch of x's shape.
    """
    np.multiply(x[:, :, ::-1], sin, out=turned)
    np.multiply(x, cos, out=x)
    np.add(x, turned, out=x)
