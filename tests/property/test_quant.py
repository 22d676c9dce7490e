"""Quantise and dequantise: the properties that the docstring of pykestrel.quant promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pykestrel.quant import (
    GROUP,
    LIMIT,
    MIN_SCALE,
    Q4_DIVISORS,
    QTensor,
    bf16_to_f32,
    concat_rows,
    dequantize,
    f16_to_f32,
    f32_to_bf16,
    quantize,
    quantize_bf16,
    quantized_bytes,
)

F32 = NDArray[np.float32]
KINDS = ["q8", "q4"]


@st.composite
def matrices(draw: st.DrawFn, max_rows: int = 5, max_k: int = 100) -> F32:
    """Matrices of every magnitude that is allowed, with zero groups, ties and outliers."""
    n = draw(st.integers(1, max_rows))
    k = draw(st.integers(1, max_k))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "uniform", "outlier", "coarse", "mixed"]))
    w = rng.standard_normal((n, k))
    if kind == "uniform":
        w = rng.uniform(-1, 1, (n, k))
    elif kind == "outlier":
        w = rng.standard_t(2, (n, k))
    elif kind == "coarse":  # many ties in magnitude
        w = rng.integers(-3, 4, (n, k)).astype(float)
    elif kind == "mixed":  # another magnitude for every row
        w = w * 10.0 ** rng.integers(-9, 4, (n, 1))
    w = w * 10.0 ** draw(st.integers(-10, 3))
    return np.clip(w, -LIMIT["q4"], LIMIT["q4"]).astype(np.float32)


def codes_of(q: QTensor) -> NDArray[np.int64]:
    """Codes ``[..., N, G, 32]``, read from the layout that the docstring states."""
    lead = q.codes.shape[:-1]
    if q.kind == "q8":
        return q.codes.astype(np.int64).reshape(*lead, -1, GROUP)
    packed = q.codes.astype(np.int64).reshape(*lead, -1, GROUP // 2)
    return np.concatenate([packed & 15, packed >> 4], axis=-1) - 8


def groups_of(w: F32) -> F32:
    """``[..., N, G, 32]``, padded with zeros."""
    pad = -w.shape[-1] % GROUP
    padded = np.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, pad)])
    return padded.reshape(*w.shape[:-1], -1, GROUP)


def same_bytes(a: QTensor, b: QTensor) -> bool:
    return (
        (a.kind, a.shape) == (b.kind, b.shape)
        and a.codes.tobytes() == b.codes.tobytes()
        and a.scales.tobytes() == b.scales.tobytes()
    )


# ---- the definition, once more and plainly, group by group


def q8_reference(group: F32) -> tuple[np.float16, list[int]]:
    scale = np.float16(np.float32(np.abs(group).max()) / np.float32(127))
    scale = max(scale, np.float16(MIN_SCALE))
    codes = [int(np.clip(np.rint(w / np.float32(scale)), -127, 127)) for w in group]
    return scale, codes


def q4_reference(group: F32) -> tuple[np.float16, list[int]]:
    extreme = group[int(np.argmax(np.abs(group)))]
    best: tuple[np.float16, list[int]] | None = None
    best_error = np.float32(np.inf)
    for divisor in Q4_DIVISORS:
        scale = np.float16(extreme / np.float32(divisor))
        if abs(scale) < MIN_SCALE:
            scale = np.copysign(np.float16(MIN_SCALE), scale)
        s = np.float32(scale)
        codes = [int(np.clip(np.rint(w / s), -8, 7)) for w in group]
        errors = [(w - np.float32(c) * s) ** 2 for w, c in zip(group, codes, strict=True)]
        while len(errors) > 1:
            half = len(errors) // 2
            errors = [errors[i] + errors[i + half] for i in range(half)]
        if errors[0] < best_error:
            best, best_error = (scale, codes), errors[0]
    assert best is not None
    return best


@given(matrices(max_rows=2, max_k=70), st.sampled_from(KINDS))
@settings(max_examples=60)
def test_bytes_are_those_of_the_plain_definition(w: F32, kind: str) -> None:
    q = quantize(w, kind)
    reference = q8_reference if kind == "q8" else q4_reference
    codes = codes_of(q)
    for n, row in enumerate(groups_of(w)):
        for g, group in enumerate(row):
            scale, want = reference(group)
            assert q.scales[n, g].tobytes() == scale.tobytes()
            assert codes[n, g].tolist() == want


@given(matrices())
def test_q8_error_is_at_most_half_a_step(w: F32) -> None:
    q = quantize(w, "q8")
    error = np.abs(groups_of(dequantize(q)).astype(np.float64) - groups_of(w))
    step = q.scales.astype(np.float64)[..., None]
    assert (error <= step / 2 * (1 + 1e-6)).all()


@given(matrices())
def test_q4_error_is_never_worse_than_rounding_by_the_largest_magnitude(w: F32) -> None:
    q = quantize(w, "q4")
    groups = groups_of(w).astype(np.float64)
    error = ((groups_of(dequantize(q)) - groups) ** 2).sum(-1)
    absmax = np.abs(groups).max(-1)
    for divisor in (7.0, 8.0):
        scale = (absmax / divisor).astype(np.float32).astype(np.float16)
        scale = np.maximum(scale, np.float16(MIN_SCALE)).astype(np.float64)[..., None]
        plain = np.clip(np.rint(groups / scale), -8, 7) * scale
        worst = ((plain - groups) ** 2).sum(-1)
        # float32 sums of 32 squares: the search may be off by their rounding.
        assert (error <= worst * (1 + 1e-5) + 1e-30).all()


def test_q4_search_is_worth_its_time() -> None:
    w = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    groups = groups_of(w).astype(np.float64)
    error = ((groups_of(dequantize(quantize(w, "q4"))) - groups) ** 2).mean()
    scale = np.abs(groups).max(-1, keepdims=True) / 7
    plain = ((np.rint(groups / scale) * scale - groups) ** 2).mean()
    assert error < 0.75 * plain


@given(matrices(), st.sampled_from(KINDS))
def test_quantising_what_was_dequantised_changes_nothing(w: F32, kind: str) -> None:
    once = dequantize(quantize(w, kind))
    again = dequantize(quantize(once, kind))
    np.testing.assert_array_equal(again, once)


@given(matrices())
def test_q8_of_minus_w_has_the_same_scales_and_the_negated_codes(w: F32) -> None:
    q, minus = quantize(w, "q8"), quantize(-w, "q8")
    np.testing.assert_array_equal(minus.scales, q.scales)
    np.testing.assert_array_equal(minus.codes, -q.codes)


@given(matrices())
def test_q4_of_minus_w_has_the_same_codes_and_the_negated_scales(w: F32) -> None:
    q, minus = quantize(w, "q4"), quantize(-w, "q4")
    np.testing.assert_array_equal(dequantize(minus), -dequantize(q))
    some = np.abs(groups_of(w)).max(-1) > 0  # a zero has no sign to take over
    np.testing.assert_array_equal(minus.scales[some], -q.scales[some])
    np.testing.assert_array_equal(codes_of(minus)[some], codes_of(q)[some])


@given(matrices(), st.sampled_from(KINDS), st.integers(0, 1000))
def test_rows_are_independent(w: F32, kind: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(w))
    q = quantize(w, kind)
    permuted = quantize(w[order], kind)
    assert permuted.codes.tobytes() == q.codes[order].tobytes()
    assert permuted.scales.tobytes() == q.scales[order].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_result_does_not_depend_on_how_rows_fall_into_tiles(kind: str) -> None:
    w = np.random.default_rng(1).standard_normal((300, 1024)).astype(np.float32)  # five tiles
    whole = quantize(w, kind)
    parts = [quantize(w[lo : lo + 7], kind) for lo in range(0, 300, 7)]
    assert same_bytes(whole, concat_rows(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_group_of_zeros(kind: str) -> None:
    w = np.zeros((1, 64), np.float32)
    w[0, 40] = 1.0
    q = quantize(w, kind)
    assert abs(q.scales[0, 0]) == np.float16(MIN_SCALE)
    assert not codes_of(q)[0, 0].any()
    assert not dequantize(q)[0, :32].any()
    assert dequantize(q)[0, 40] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [1e-45, 1e-38, 1e-12, 1e-6, 5e-5, 1e-4, 9e-4, 7e-3])
def test_tiny_groups_keep_their_defined_meaning(kind: str, top: float) -> None:
    w = (np.linspace(-1, 1, 32) * top).astype(np.float32)[None]
    q = quantize(w, kind)
    size = abs(float(q.scales[0, 0]))
    assert size >= MIN_SCALE
    if top / (127 if kind == "q8" else 9) <= MIN_SCALE:
        assert size == MIN_SCALE
    assert np.abs(dequantize(q) - w).max() <= size * (0.5 if kind == "q8" else 1.1)


def test_subnormal_scales_are_ordinary_values() -> None:
    scale = 2.0**-16  # below 2**-14, the smallest normal float16
    w = (np.arange(-16, 16) * scale).astype(np.float32)[None]
    w[0, 0] = 127 * scale
    q = quantize(w, "q8")
    assert float(q.scales[0, 0]) == scale
    np.testing.assert_array_equal(dequantize(q), w)


@pytest.mark.parametrize("kind", KINDS)
def test_largest_weight_is_held_and_one_more_is_refused(kind: str) -> None:
    w = np.full((1, 32), LIMIT[kind], np.float32)
    assert dequantize(quantize(w, kind))[0, 0] == pytest.approx(LIMIT[kind], rel=1e-3)
    w[0, 3] = np.nextafter(np.float32(LIMIT[kind]), np.float32(np.inf))
    with pytest.raises(ValueError, match=f"magnitude .* more than .* that {kind} can hold"):
        quantize(w, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [(0, 0), (130, 1023), (299, 511)])
def test_a_weight_that_is_not_finite_is_refused(
    kind: str, bad: float, where: tuple[int, int]
) -> None:
    w = np.zeros((300, 1024), np.float32)
    w[where] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(w, kind)
    with pytest.raises(ValueError, match="not finite"):
        quantize_bf16(f32_to_bf16(w), kind)


@given(matrices(), st.sampled_from(KINDS))
def test_last_group_is_padded_with_zeros(w: F32, kind: str) -> None:
    pad = -w.shape[1] % GROUP
    q, padded = quantize(w, kind), quantize(np.pad(w, [(0, 0), (0, pad)]), kind)
    assert q.shape == w.shape
    assert q.codes.tobytes() == padded.codes.tobytes()
    assert q.scales.tobytes() == padded.scales.tobytes()
    np.testing.assert_array_equal(dequantize(q), dequantize(padded)[:, : w.shape[1]])
    assert q.nbytes == quantized_bytes(w.shape, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_stacks_of_experts(kind: str) -> None:
    w = np.random.default_rng(2).standard_normal((3, 4, 50)).astype(np.float32)
    q = quantize(w, kind)
    assert q.shape == (3, 4, 50)
    for e in range(3):
        assert same_bytes(q[e], quantize(w[e], kind))
        assert same_bytes(q.rows(1, 3)[e], quantize(w[e, 1:3], kind))
        assert np.shares_memory(q[e].codes, q.codes)
    np.testing.assert_array_equal(dequantize(q)[2], dequantize(q[2]))
    both = concat_rows([q, q.rows(0, 2)])
    assert same_bytes(both, quantize(np.concatenate([w, w[:, :2]], axis=1), kind))
    with pytest.raises(IndexError, match="not a stack"):
        q[0][0]


@pytest.mark.parametrize("kind", KINDS)
def test_layout_of_the_codes(kind: str) -> None:
    """The worked example: code of k is k - 8 for q4, 4 * k - 127 for q8, at scale 1."""
    k = np.arange(32)
    values = np.where(k < 16, k % 16 - 8, 0) if kind == "q4" else 4 * k - 127
    q = quantize(values.astype(np.float32)[None], kind)
    assert q.scales[0, 0] == 1.0
    if kind == "q4":
        assert q.codes[0].tolist() == [j | 8 << 4 for j in range(16)]
    else:
        assert q.codes[0].tolist() == values.tolist()


@given(matrices(), st.sampled_from(KINDS))
def test_bf16_bits_and_their_float32_values_quantise_alike(w: F32, kind: str) -> None:
    bits = f32_to_bf16(w)
    values = bf16_to_f32(bits)
    if np.abs(values).max() <= LIMIT[kind]:
        assert same_bytes(quantize_bf16(bits, kind), quantize(values, kind))


def test_dequantize_into_a_buffer() -> None:
    w = np.random.default_rng(3).standard_normal((5, 33)).astype(np.float32)
    q = quantize(w, "q8")
    out = np.full((5, 33), np.nan, np.float32)
    assert dequantize(q, out) is out
    np.testing.assert_array_equal(out, dequantize(q))


@given(st.integers(0, 0xFFFF))
def test_bf16_round_trip_is_exact_for_every_pattern(bits: int) -> None:
    one = np.array([bits], np.uint16)
    back = f32_to_bf16(bf16_to_f32(one))
    if np.isnan(bf16_to_f32(one))[0]:
        assert np.isnan(bf16_to_f32(back))[0]
    else:
        assert back[0] == bits


def test_bf16_rounds_to_nearest_even() -> None:
    words = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x80000000],
        np.uint32,
    )
    got = f32_to_bf16(words.view(np.float32)).tolist()
    assert got == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x8000]


@pytest.mark.parametrize("word", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_bf16_keeps_a_nan(word: int) -> None:
    """Rounding the payload up must not carry into infinity or into the sign."""
    x = np.array([word], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(x)))[0]


def test_every_float16_is_exact_in_float32() -> None:
    every = np.arange(0x10000, dtype=np.uint32).astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(f16_to_f32(every), every.astype(np.float64))


@pytest.mark.parametrize(
    ("kind", "shape", "codes", "scales", "words"),
    [
        ("q5", (1, 32), np.zeros((1, 32), np.int8), np.zeros((1, 1), np.float16), "q5"),
        ("q8", (32,), np.zeros(32, np.int8), np.zeros(1, np.float16), "2 or more dimensions"),
        ("q8", (1, 32), np.zeros((1, 33), np.int8), np.zeros((1, 1), np.float16), "codes"),
        ("q8", (1, 33), np.zeros((1, 64), np.int8), np.zeros((1, 1), np.float16), "scales"),
        ("q4", (1, 32), np.zeros((1, 16), np.int8), np.zeros((1, 1), np.float16), "uint8"),
        ("q4", (1, 32), np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.float32), "float16"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    kind: str,
    shape: tuple[int, ...],
    codes: NDArray[np.int8],
    scales: NDArray[np.float16],
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        QTensor(kind, shape, codes, scales)


def test_misuse_is_refused() -> None:
    w = np.zeros((2, 32), np.float32)
    with pytest.raises(ValueError, match="q3"):
        quantize(w, "q3")
    with pytest.raises(ValueError, match="2 or more dimensions"):
        quantize(w[0], "q8")
    with pytest.raises(ValueError, match="rows of q4"):
        concat_rows([quantize(w, "q8"), quantize(w, "q4")])
    with pytest.raises(ValueError, match="cannot put rows"):
        concat_rows([quantize(w, "q8"), quantize(w[:, :31], "q8")])
