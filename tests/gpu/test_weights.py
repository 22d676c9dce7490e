"""Weights on the device: packing, quantising and multiplying, each against NumPy.

Runs on a GPU where there is one, else on the emulated library (native/tests/emu).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pykestrel import native
from pykestrel.errors import NativeError
from pykestrel.quant import (
    LIMIT,
    QTensor,
    bf16_to_f32,
    dequantize,
    f32_to_bf16,
    quantize,
    quantize_bf16,
)

KEY = 7
SHAPES = [
    (1, 1, 32),
    (1, 16, 128),
    (1, 5, 16),
    (1, 17, 96),
    (3, 9, 160),
    (2, 33, 288),
    (1, 130, 576),
]


@pytest.fixture(autouse=True)
def what_comes_back_was_written() -> None:
    """Not looked at: eight q4 codes that come back may be any 32 bits."""


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    request.node.user_properties.append(("seed", seed))  # named in the report of a failure
    return np.random.default_rng(seed)


def awkward(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> NDArray[np.float32]:
    """Normal weights with groups that are zero, tiny, subnormal, lopsided or near the limit."""
    w = rng.standard_normal(shape).astype(np.float32)
    flat = w.reshape(-1)
    for start in range(0, flat.size, 32):
        part = flat[start : start + 32]
        match int(rng.integers(0, 12)):
            case 0:
                part[:] = 0
            case 1:
                part *= np.float32(1e-6)
            case 2:
                part *= np.float32(1e-39)
            case 3:
                part[int(rng.integers(part.size))] *= 1000
            case 4:
                part[:] = np.float32(LIMIT[kind]) * np.sign(part)
            case 5:
                part[:] = np.round(part * 4) / 4  # ties of rounding, and of the largest magnitude
    return w


def upload(handle: native.Handle, matrix: native.Matrix, rows: NDArray[Any], **how: Any) -> None:
    """Give the rows in three uneven parts, the last first."""
    n = len(rows)
    edges = sorted({0, n // 3, n // 3 + 1, n} & set(range(n + 1)))
    parts = list(itertools.pairwise(edges))
    native.cache_begin(handle, KEY, matrix)
    for lo, hi in reversed(parts):
        native.cache_rows(handle, KEY, matrix, lo, np.ascontiguousarray(rows[lo:hi]), **how)
    native.cache_end(handle, KEY)


def put(handle: native.Handle, q: QTensor) -> native.Matrix:
    stack = q.shape[0] if len(q.shape) == 3 else 1
    matrix = native.Matrix(q.kind, stack, q.shape[-2], q.shape[-1])
    codes = q.codes.reshape(matrix.rows, -1)
    scales = q.scales.reshape(matrix.rows, -1)
    native.cache_begin(handle, KEY, matrix)
    native.cache_rows(handle, KEY, matrix, 0, codes, scales)
    native.cache_end(handle, KEY)
    return matrix


@pytest.mark.parametrize("kind", ["q8", "q4"])
@pytest.mark.parametrize("source", ["bf16", "f32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_device_quantises_to_the_bytes_of_numpy(
    handle: native.Handle,
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    source: str,
    kind: str,
) -> None:
    w = awkward(rng, shape, kind)
    if source == "bf16":
        bits = f32_to_bf16(w)
        want = quantize_bf16(np.minimum(bits & 0x7FFF, 0x4800) | (bits & 0x8000), kind)
        rows: NDArray[Any] = np.minimum(bits & 0x7FFF, 0x4800) | (bits & 0x8000)
    else:
        want, rows = quantize(w, kind), w
    matrix = native.Matrix(kind, *shape)
    upload(handle, matrix, rows.reshape(matrix.rows, -1), source=source)
    codes, scales = native.cache_read(handle, KEY, 0, matrix.rows)
    assert scales is not None
    wanted = want.scales.reshape(scales.shape)
    np.testing.assert_array_equal(scales.view(np.uint16), wanted.view(np.uint16))
    np.testing.assert_array_equal(codes, want.codes.reshape(codes.shape))


@pytest.mark.parametrize("kind", ["bf16", "q8", "q4", "f32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_put_is_read_back(
    handle: native.Handle, rng: np.random.Generator, shape: tuple[int, int, int], kind: str
) -> None:
    w = rng.standard_normal(shape).astype(np.float32)
    if kind in ("q8", "q4"):
        q = quantize(w, kind)
        matrix = put(handle, q)
        codes, scales = native.cache_read(handle, KEY, 0, matrix.rows)
        np.testing.assert_array_equal(codes, q.codes.reshape(codes.shape))
        assert scales is not None
        np.testing.assert_array_equal(scales, q.scales.reshape(scales.shape))
    else:
        matrix = native.Matrix(kind, *shape)
        rows = (f32_to_bf16(w) if kind == "bf16" else w).reshape(matrix.rows, -1)
        upload(handle, matrix, rows)
        codes, scales = native.cache_read(handle, KEY, 0, matrix.rows)
        np.testing.assert_array_equal(codes, rows)
        assert scales is None
    lo, hi = matrix.rows // 3, matrix.rows
    part, _ = native.cache_read(handle, KEY, lo, hi - lo)
    np.testing.assert_array_equal(part, codes[lo:hi])


def test_float32_rows_of_a_bf16_entry_are_rounded(
    handle: native.Handle, rng: np.random.Generator
) -> None:
    w = rng.standard_normal((21, 80)).astype(np.float32)
    matrix = native.Matrix("bf16", 1, 21, 80)
    upload(handle, matrix, w, source="f32")
    np.testing.assert_array_equal(native.cache_read(handle, KEY, 0, 21)[0], f32_to_bf16(w))


@pytest.mark.parametrize("kind", ["q8", "q4", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 40, 2080)])
@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
def test_a_product_is_that_of_numpy(
    handle: native.Handle,
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    kind: str,
    size: float,
) -> None:
    stack, _, k = shape
    w = rng.standard_normal(shape).astype(np.float32)
    if kind == "bf16":
        matrix = native.Matrix(kind, *shape)
        bits = f32_to_bf16(w)
        upload(handle, matrix, bits.reshape(matrix.rows, k))
        exact = bf16_to_f32(bits).astype(np.float64)
    else:
        q = quantize(w, kind)
        put(handle, q)
        exact = dequantize(q).astype(np.float64)
    x = (rng.standard_normal((2, k)) * size).astype(np.float32)
    for index in range(stack):
        y = native.dev_gemm(handle, KEY, x, index)
        want = x.astype(np.float64) @ exact[index].T
        # int16 activations: half a step of 1 / 32639 of a group's largest value, at random
        bound = 2e-6 if kind == "bf16" else 4e-5
        scale = np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) * np.linalg.norm(
            exact[index], axis=1
        )
        assert np.max(np.abs(y - want) / scale) < bound


@pytest.mark.parametrize("kind", ["q8", "q4", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_an_activation_reaches_the_result(
    handle: native.Handle, rng: np.random.Generator, kind: str, bad: float
) -> None:
    w = rng.standard_normal((20, 96)).astype(np.float32)
    if kind == "bf16":
        upload(handle, native.Matrix(kind, 1, 20, 96), f32_to_bf16(w))
    else:
        put(handle, quantize(w, kind))
    x = rng.standard_normal((1, 96)).astype(np.float32)
    x[0, int(rng.integers(96))] = bad
    assert not np.isfinite(native.dev_gemm(handle, KEY, x)).any()


@pytest.mark.parametrize("kind", ["q8", "q4"])
@pytest.mark.parametrize("size", [8e37, 1e38, 3e38])
def test_an_enormous_activation_does_not_vanish(
    handle: native.Handle, rng: np.random.Generator, kind: str, size: float
) -> None:
    """A fast division by more than 2^126 gives 0, which would make zeros of a whole group."""
    w = rng.uniform(-0.5, 0.5, (20, 96)).astype(np.float32)
    q = quantize(w, kind)
    put(handle, q)
    x = np.zeros((1, 96), np.float32)
    x[0, 40] = size
    got = native.dev_gemm(handle, KEY, x)[0]
    if np.isfinite(got).any():
        want = dequantize(q)[:, 40] * np.float32(size)
        assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_a_weight_that_rounds_up_to_infinity_is_refused(handle: native.Handle) -> None:
    w = np.zeros((20, 96), np.float32)
    w[3, 5] = 3.39e38  # the largest bf16
    upload(handle, native.Matrix("bf16", 1, 20, 96), w, source="f32")
    w[3, 5] = -np.finfo(np.float32).max
    with pytest.raises(NativeError, match="too large for BF16"):
        upload(handle, native.Matrix("bf16", 1, 20, 96), w, source="f32")


@pytest.mark.parametrize("kind", ["q8", "q4"])
@pytest.mark.parametrize("bad", ["nan", "inf", "large"])
def test_a_weight_that_cannot_be_quantised_is_refused(
    handle: native.Handle, rng: np.random.Generator, kind: str, bad: str
) -> None:
    w = rng.standard_normal((20, 96)).astype(np.float32)
    w[19, 95] = {"nan": np.nan, "inf": -np.inf, "large": LIMIT[kind] * 1.001}[bad]
    with pytest.raises(NativeError, match=r"NaN or infinite|large"):
        upload(handle, native.Matrix(kind, 1, 20, 96), w, source="f32")
    with pytest.raises(NativeError):
        native.cache_find(handle, KEY)


@pytest.mark.parametrize("kind", ["q8", "q4", "bf16", "f32"])
def test_random_weights_have_the_promised_size(handle: native.Handle, kind: str) -> None:
    matrix = native.Matrix(kind, 2, 48, 256)
    native.cache_fill(handle, KEY, matrix, seed=3)
    codes, scales = native.cache_read(handle, KEY, 0, matrix.rows)
    if kind == "bf16":
        w = bf16_to_f32(codes)
    elif kind == "f32":
        w = codes
    else:
        assert scales is not None
        w = dequantize(QTensor(kind, (matrix.rows, matrix.k), codes, scales))
    rms = np.sqrt(np.mean(np.square(w), axis=1)) * np.sqrt(matrix.k)
    assert np.all((rms > 0.7) & (rms < 1.3)), "every row has root-mean-square 1 / sqrt(k)"
    assert abs(float(rms.mean()) - 1) < 0.02
    assert len(np.unique(w[:, 0])) > 10, "rows differ"
