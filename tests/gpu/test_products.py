"""Products of the caller's rows with weights of the cache: against NumPy, and against each other.

Runs on a GPU where there is one, else on the emulated library (native/tests/emu).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from numpy.typing import NDArray

from pykestrel import native
from pykestrel.errors import NativeError, UsageError
from pykestrel.native import Matrix, Product, Products, Proj
from pykestrel.quant import bf16_to_f32, dequantize, f32_to_bf16, quantize

F32 = NDArray[np.float32]
KINDS = ["q8", "q4", "bf16"]
FEW = 4  # kFewRows of native/src/products.h
POISON = np.float32(-7.25e20)

# Of ||x|| ||w||. Few rows: int16 activations, three bfloat16 parts. Many: a weight rounded to
# float16, two bfloat16 parts.
BOUND = {
    ("few", "q8"): 4e-5, ("few", "q4"): 4e-5, ("few", "bf16"): 2e-6,
    ("many", "q8"): 3e-4, ("many", "q4"): 3e-4, ("many", "bf16"): 2e-5,
}  # fmt: skip


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    request.node.user_properties.append(("seed", seed))  # named in the report of a failure
    return np.random.default_rng(seed)


def put(handle: native.Handle, key: int, kind: str, w: F32) -> NDArray[np.float64]:
    """Make an entry of ``w`` [stack, n, k] or [n, k], and give what it really is."""
    stack = w.shape[0] if w.ndim == 3 else 1
    matrix = Matrix(kind, stack, w.shape[-2], w.shape[-1])
    native.cache_begin(handle, key, matrix)
    if kind == "bf16":
        bits = f32_to_bf16(w)
        native.cache_rows(handle, key, matrix, 0, bits.reshape(matrix.rows, -1))
        exact = bf16_to_f32(bits)
    else:
        q = quantize(w, kind)
        codes, scales = q.codes.reshape(matrix.rows, -1), q.scales.reshape(matrix.rows, -1)
        native.cache_rows(handle, key, matrix, 0, codes, scales)
        exact = dequantize(q)
    native.cache_end(handle, key)
    return exact.astype(np.float64)


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape).astype(np.float32)


def close(y: F32, x: F32, w: NDArray[np.float64], kind: str, rows: int) -> None:
    wide = x.astype(np.float64)
    size = np.linalg.norm(wide, axis=1, keepdims=True) * np.linalg.norm(w, axis=1)
    bound = BOUND["few" if rows <= FEW else "many", kind]
    assert np.max(np.abs(y - wide @ w.T) / size) < bound


def fused(handle: native.Handle, products: list[Product], x: F32, y: F32) -> None:
    native.dev_gemm_fused(handle, Products(products), x, y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1003, 176), (3, 1003, 176), (4, 75, 2200), (5, 203, 176), (33, 203, 178),
                      (130, 203, 176)]
)  # fmt: skip
def test_a_product_is_that_of_numpy(
    handle: native.Handle, rng: np.random.Generator, kind: str, m: int, n: int, k: int
) -> None:
    w = put(handle, 7, kind, normal(rng, n, k))
    x = normal(rng, m, k)
    close(native.dev_gemm(handle, 7, x), x, w, kind, m)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 3, FEW, FEW + 1, 70])
def test_q_k_v_together_alone_and_as_one(
    handle: native.Handle, rng: np.random.Generator, kind: str, m: int
) -> None:
    k, sizes = 176, {Proj.Q: 83, Proj.K: 40, Proj.V: 41}
    columns = sum(sizes.values())
    w = normal(rng, columns, k)
    put(handle, native.wkey(0, Proj.FUSED_QKV), kind, w)
    x = normal(rng, m, k)
    alone = np.empty((m, columns), np.float32)
    products, at = [], 0
    for proj, n in sizes.items():
        key = native.wkey(0, proj)
        put(handle, key, kind, w[at : at + n])
        alone[:, at : at + n] = native.dev_gemm(handle, key, x)
        products.append(Product(key, m, columns, y=at))
        at += n
    together = np.empty_like(alone)
    fused(handle, products, x, together)
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(
        native.dev_gemm(handle, native.wkey(0, Proj.FUSED_QKV), x), together
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [32, 37])  # without and with padding between gate and up
@pytest.mark.parametrize("m", [1, 2, 9])
def test_a_stack_as_a_whole(
    handle: native.Handle, rng: np.random.Generator, kind: str, n: int, m: int
) -> None:
    w = normal(rng, 2, n, 100)
    exact = put(handle, 3, kind, w)
    put(handle, 4, kind, w[0])
    put(handle, 5, kind, w[1])
    x = normal(rng, m, 100)
    both = np.full((m, 2 * n + 5), POISON)
    fused(handle, [Product(3, m, 2 * n + 5, index=-1)], x, both)
    np.testing.assert_array_equal(both[:, 2 * n :], POISON)
    for i in range(2):
        half = both[:, i * n : i * n + n]
        np.testing.assert_array_equal(half, native.dev_gemm(handle, 3, x, i))
        np.testing.assert_array_equal(half, native.dev_gemm(handle, 4 + i, x))
        close(half, x, exact[i], kind, m)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone(
    handle: native.Handle, rng: np.random.Generator, kind: str
) -> None:
    put(handle, 7, kind, normal(rng, 203, 176))
    x = normal(rng, FEW, 176)
    rows = [native.dev_gemm(handle, 7, x[i : i + 1])[0] for i in range(FEW)]
    for m in range(1, FEW + 1):
        np.testing.assert_array_equal(native.dev_gemm(handle, 7, x[:m]), rows[:m])


def test_kinds_and_rows_of_all_sorts_in_one_call(
    handle: native.Handle, rng: np.random.Generator
) -> None:
    """Every member has its result, as alone, and what lies between results stays."""
    x = normal(rng, 60, 176)
    cases = [("q8", 1, 3), ("bf16", 3, 0), ("q4", 40, 20), ("q8", 40, 20), ("bf16", 40, 20),
             ("q4", 4, 56), ("q8", 17, 43), ("q4", 1, 59)]  # fmt: skip
    products, wanted, at = [], [], 2
    for key, (kind, rows, first) in enumerate(cases):
        n = int(rng.integers(1, 90))
        put(handle, key, kind, normal(rng, n, 176))
        stride = n + int(rng.integers(0, 9))
        products.append(Product(key, rows, stride, first=first, y=at))
        wanted.append((at, stride, native.dev_gemm(handle, key, x[first : first + rows])))
        at += rows * stride + 3
    want = np.full(at, POISON)
    for begin, stride, result in wanted:
        for i, row in enumerate(result):
            want[begin + i * stride : begin + i * stride + len(row)] = row
    y = np.full(at, POISON)
    fused(handle, [products[i] for i in rng.permutation(len(products))], x, y)
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("kind", KINDS)
def test_single_experts(handle: native.Handle, rng: np.random.Generator, kind: str) -> None:
    """More than one launch takes, some with more rows than are few."""
    hidden, f, experts, layer = 96, 32, 37, 5
    counts = [1 + (i % 3) for i in range(experts)]
    counts[4], counts[30] = 7, 12
    firsts = np.cumsum([0, *counts])
    x = normal(rng, int(firsts[-1]), hidden)
    both = np.empty((len(x), 2 * f), np.float32)
    wide, narrow = [], []
    for i, rows in enumerate(counts):
        first = int(firsts[i])
        gate_up = native.wkey(layer, Proj.EXPERT_GU + i)
        down = native.wkey(layer, Proj.EXPERT_DOWN + i)
        wide.append((put(handle, gate_up, kind, normal(rng, 2, f, hidden)), first, rows))
        narrow.append(Product(down, rows, hidden, first=first, y=first * hidden))
        put(handle, down, kind, normal(rng, hidden, f))
    products = Products(
        [
            Product(native.wkey(layer, Proj.EXPERT_GU + i), rows, 2 * f, first, -1, first * 2 * f)
            for i, (_, first, rows) in enumerate(wide)
        ]
    )
    assert len(products) == experts
    native.prof_reset(handle)
    native.dev_gemm_fused(handle, products, x, both)
    prof = native.prof_read(handle)
    # 65 rows or so of few, 32 a launch; an operand and a product of each of the other two
    few = sum(rows for rows in counts if rows <= FEW)
    assert prof.launches == -(-few // 32) + 4
    assert (prof.h2d_copies, prof.d2h_copies) == (1, 1)
    for w, first, rows in wide:
        mine = slice(first, first + rows)
        close(both[mine], x[mine], w.reshape(2 * f, hidden), kind, rows)
    hidden_rows = np.ascontiguousarray(both[:, :f])
    out = np.empty((len(x), hidden), np.float32)
    fused(handle, narrow, hidden_rows, out)
    for p in narrow:
        mine = slice(p.first, p.first + p.rows)
        np.testing.assert_array_equal(out[mine], native.dev_gemm(handle, p.key, hidden_rows[mine]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [1e6, np.nan, -np.inf])
def test_what_float16_cannot_hold(
    handle: native.Handle, rng: np.random.Generator, kind: str, bad: float
) -> None:
    """q8 and q4 meet float16: such rows are multiplied as decoding does, others of the call not."""
    put(handle, 1, kind, normal(rng, 75, 176))
    put(handle, 2, kind, normal(rng, 20, 176))
    x = normal(rng, 30, 176)
    x[7, int(rng.integers(176))] = bad
    fine = native.dev_gemm(handle, 2, x[10:30])
    alone = native.dev_gemm(handle, 1, x)
    y, z = np.empty((30, 75), np.float32), np.empty((20, 20), np.float32)
    both = np.empty(y.size + z.size, np.float32)
    native.prof_reset(handle)
    fused(handle, [Product(1, 30, 75), Product(2, 20, 20, first=10, y=y.size)], x, both)
    assert native.prof_read(handle).d2h_copies == (1 if kind == "bf16" else 2)
    np.testing.assert_array_equal(both[: y.size].reshape(y.shape), alone)
    np.testing.assert_array_equal(both[y.size :].reshape(z.shape), fine)
    assert np.isfinite(alone).all(axis=1).tolist() == [
        np.isfinite(bad) or i != 7 for i in range(30)
    ]
    if kind != "bf16":
        for i in range(30):
            np.testing.assert_array_equal(alone[i], native.dev_gemm(handle, 1, x[i : i + 1])[0])


@pytest.mark.parametrize("kind", ["q8", "bf16"])
def test_more_rows_than_a_chunk(handle: native.Handle, rng: np.random.Generator, kind: str) -> None:
    m = 2048 + 3
    w = put(handle, 1, kind, normal(rng, 16, 32))
    x = normal(rng, m, 32)
    y = native.dev_gemm(handle, 1, x)
    close(y, x, w, kind, m)
    x[2049, 3] = 1e6  # the second chunk alone
    again = native.dev_gemm(handle, 1, x)
    np.testing.assert_array_equal(again[:2048], y[:2048])
    if kind == "q8":
        np.testing.assert_array_equal(again[2049], native.dev_gemm(handle, 1, x[2049:2050])[0])


def test_prof_and_memory(handle: native.Handle, rng: np.random.Generator) -> None:
    """One launch, one copy each way; times of the device when asked."""
    put(handle, 1, "q8", normal(rng, 64, 96))
    put(handle, 2, "q8", normal(rng, 32, 96))
    products = Products([Product(1, 1, 64), Product(2, 1, 32, y=64)])
    x, y = normal(rng, 1, 96), np.empty(96, np.float32)
    native.prof_reset(handle)
    native.dev_gemm_fused(handle, products, x, y)
    prof = native.prof_read(handle)
    assert (prof.launches, prof.h2d_copies, prof.d2h_copies) == (1, 1, 1)
    assert (prof.h2d_bytes, prof.d2h_bytes) == (2 * 256, 96 * 4)
    assert (prof.cache_probe.count, prof.h2d.count, prof.d2h_sync.count) == (1, 1, 1)
    assert prof.gemm.count == prof.reduce.count == 0
    native.prof_timing(handle, True)
    native.dev_gemm_fused(handle, products, x, y)
    native.prof_timing(handle, False)
    prof = native.prof_read(handle)
    assert (prof.gemm.count, prof.launches, prof.h2d_copies, prof.d2h_copies) == (1, 2, 2, 2)


def test_a_repeated_call_takes_no_memory(
    handle: native.Handle, fake: FakeCuda, rng: np.random.Generator
) -> None:
    put(handle, 1, "q4", normal(rng, 64, 96))
    big, small = normal(rng, 40, 96), normal(rng, 2, 96)
    wanted = [native.dev_gemm(handle, 1, x) for x in (small, big)]
    used, live = fake.memory_used, fake.live
    for x, want in zip((small, big, small), (*wanted, wanted[0]), strict=True):
        calls = fake.calls
        np.testing.assert_array_equal(native.dev_gemm(handle, 1, x), want)
        assert (fake.memory_used, fake.live) == (used, live)
        assert fake.calls - calls < 10  # the current device, two copies, kernels, one wait


# -------------------------------------------------------------------------------------- refusals


def call(products: list[Product], k: int = 96, floats: int = 1000) -> Callable[..., None]:
    """A call that is refused, with 8 rows of x; it must leave y alone."""

    def act(handle: native.Handle) -> None:
        y = np.full(floats, POISON)
        try:
            fused(handle, products, np.ones((8, k), np.float32), y)
        finally:
            np.testing.assert_array_equal(y, POISON)

    return act


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (call([Product(1, 0, 64)]), r"products\[0\].rows is 0; it must be 1 or more"),
        (call([Product(1, 1, 64), Product(1, -3, 64)]), r"products\[1\].rows is -3"),
        (call([Product(1, 3, 64, first=6)]), r"takes 3 rows from row 6 of x, which has 8"),
        (call([Product(1, 1, 64, first=-1)]), r"takes 1 rows from row -1 of x"),
        (call([Product(1, 1, 64, first=1 << 62)]), r"from row 4611686018427387904 of x"),
        (call([Product(1, 1, 63)]), r"stride is 63, and its result has 64 columns"),
        (call([Product(3, 1, 64, index=-1)]), r"stride is 64, and its result has 66 columns"),
        (call([Product(1, 1, 64, y=937)]), r"from y \+ 937 on, and y has 1000 floats"),
        (call([Product(1, 1, 64, y=-1)]), r"from y \+ -1 on"),
        (call([Product(1, 2, 937)]), r"writes 2 rows of 64 columns, 937 apart"),
        (call([Product(1, 8, 1 << 62)]), r"4611686018427387904 apart"),
        (call([Product(1, 1, 64)], floats=63), r"y has 63 floats"),
        (call([Product(1, 1, 64), Product(3, 1, 33, y=63)]), r"two of the 2 products write to y"),
        (call([Product(1, 3, 97), Product(3, 2, 33, y=130)]), r"write to y \+ 130"),
        (call([Product(9, 1, 64)]), "is not in the cache"),
        (call([Product(2, 1, 64)]), r"the weight .* has k = 128, and rows of x have 96 numbers"),
        (call([Product(1, 1, 64), Product(2, 1, 64, y=64)]), r"products\[1\]: the weight"),
        (call([Product(1, 1, 64)], k=95), r"k = 96, and rows of x have 95"),
        (call([Product(4, 1, 64)]), r"is float32; products need bf16, q8 or q4"),
        (call([Product(1, 1, 64, index=1)]), r"matrix 1 of the weight .* a stack of 1"),
        (call([Product(1, 1, 64, index=-2)]), r"matrix -2 of the weight"),
    ],
)  # fmt: skip
def test_what_is_refused(
    handle: native.Handle, rng: np.random.Generator, act: Any, words: str
) -> None:
    put(handle, 1, "q8", normal(rng, 64, 96))
    put(handle, 2, "q8", normal(rng, 64, 128))
    put(handle, 3, "q4", normal(rng, 2, 33, 96))
    native.cache_fill(handle, 4, Matrix("f32", 1, 64, 96))
    before = native.prof_read(handle)
    with pytest.raises(NativeError, match=words) as caught:
        act(handle)
    assert caught.value.status == -1
    assert native.prof_read(handle) == before
    native.dev_gemm(handle, 1, np.ones((1, 96), np.float32))


def test_a_missing_expert_is_named(handle: native.Handle) -> None:
    for proj, name in ((Proj.EXPERT_GU, "EXPERT_GU"), (Proj.EXPERT_DOWN, "EXPERT_DOWN")):
        for expert in (0, 4095):
            key = native.wkey(2, proj + expert)
            with pytest.raises(NativeError, match=f"the weight {name} {expert} of layer 2 is not"):
                native.cache_find(handle, key)


def test_results_may_interleave(handle: native.Handle, rng: np.random.Generator) -> None:
    """Rows of different strides that pass between one another."""
    put(handle, 1, "q8", normal(rng, 10, 96))
    put(handle, 2, "q8", normal(rng, 6, 96))
    x = normal(rng, 6, 96)
    y = np.full(200, POISON)
    fused(handle, [Product(1, 6, 20), Product(2, 3, 40, y=12)], x, y)
    for i in range(6):
        np.testing.assert_array_equal(y[20 * i : 20 * i + 10], native.dev_gemm(handle, 1, x)[i])
    for i in range(3):
        np.testing.assert_array_equal(
            y[12 + 40 * i : 18 + 40 * i], native.dev_gemm(handle, 2, x[:3])[i]
        )
    assert (y == POISON).sum() == 200 - 60 - 18


def test_arrays_that_are_refused(handle: native.Handle, rng: np.random.Generator) -> None:
    put(handle, 1, "q8", normal(rng, 64, 96))
    one = Products([Product(1, 1, 64)])
    x, y = np.ones((1, 96), np.float32), np.zeros(64, np.float32)
    fixed = y.copy()
    fixed.flags.writeable = False
    for bad_x, bad_y, words in (
        (x.astype(np.float64), y, "x must be contiguous float32"),
        (x[0], y, r"x must be contiguous float32 \[any, any\], got float32 \[96\]"),
        (np.ones((1, 192), np.float32)[:, ::2], y, "not contiguous"),
        (x, y.astype(np.float64), "y must be contiguous float32"),
        (x, np.zeros(128, np.float32)[::2], "not contiguous"),
        (x, fixed, "can be written to"),
        (x, [0.0], "y must be contiguous float32"),
    ):
        with pytest.raises(UsageError, match=words):
            native.dev_gemm_fused(handle, one, bad_x, bad_y)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least one product"):
        Products([])
    with pytest.raises(NativeError, match="numbered from 0"):
        native.dev_gemm(handle, 1, x, -1)
