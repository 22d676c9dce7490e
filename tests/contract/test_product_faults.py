"""Faults of the CUDA runtime during products: y is as it was after -1, and the handle works."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from fake_cuda import BAD_ALLOC, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, FakeCuda

from pykestrel import native
from pykestrel.native import Matrix, Product, Products, abi
from pykestrel.native.loader import load

from .device_model import each_failing_call, status_of

pytestmark = pytest.mark.usefixtures("clean_device")

POISON = np.float32(-3e19)
N, K, FLOATS = 24, 64, 600
# few rows and many, one kind and the other
MIXED = (Product(1, 1, N), Product(2, 12, N, first=1, y=N), Product(1, 3, 2 * N, y=13 * N))


def opened() -> native.Handle:
    handle = native.create(0)
    native.cache_fill(handle, 1, Matrix("q8", 1, N, K), seed=1)
    native.cache_fill(handle, 2, Matrix("bf16", 1, N, K), seed=2)
    native.cache_fill(handle, 3, Matrix("q4", 1, N, K), seed=3)
    return handle


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((count, K)).astype(np.float32)


def caller(
    handle: native.Handle, products: tuple[Product, ...], x: np.ndarray, results: list[bytes]
) -> Callable[[], None]:
    """A call that leaves y alone unless it succeeds, and then keeps y."""
    made = Products(products)

    def act() -> None:
        y = np.full(FLOATS, POISON)
        try:
            native.dev_gemm_fused(handle, made, x, y)
        except native.NativeError:
            np.testing.assert_array_equal(y, POISON)
            raise
        results.append(y.tobytes())

    return act


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("error", [INVALID_VALUE, OUT_OF_MEMORY, BAD_ALLOC])
@pytest.mark.parametrize("case", ["mixed", "overflow", "timed"])
def test_each_call_fails(fake_cuda: FakeCuda, case: str, error: int, lazy: bool) -> None:
    handle = opened()
    with handle:
        fake_cuda.lazy(lazy)
        products, x = MIXED, rows(13)
        if case == "overflow":
            products, x[5] = (Product(3, 10, N), Product(1, 2, N, y=400)), 1e9
        results: list[bytes] = []
        act = caller(handle, products, x, results)
        native.prof_timing(handle, case == "timed")
        act()  # the buffers are there from now on

        def state() -> object:
            prof = native.prof_read(handle)
            return prof.launches, prof.h2d_copies, prof.d2h_copies, prof.d2h_sync.count

        assert each_failing_call(fake_cuda, act, lambda: None, state, error) > 6
        assert len(set(results)) == 1


@pytest.mark.parametrize("error", [INVALID_VALUE, OUT_OF_MEMORY, BAD_ALLOC])
def test_growing_fails(fake_cuda: FakeCuda, error: int) -> None:
    """The smaller buffers stay usable, and the next call may grow them."""
    for n in range(1, 100):
        handle = opened()
        with handle:
            small: list[bytes] = []
            large: list[bytes] = []
            few = caller(handle, MIXED[:1], rows(1), small)
            many = caller(handle, (Product(2, 20, N),), rows(6000), large)  # more than 1 MiB
            few()
            fake_cuda.fail_at(n, error)
            status = status_of(many)
            struck = not fake_cuda.fault_pending
            fake_cuda.fail_at(0)
            assert status in (abi.OK, abi.NOT_DONE)
            few()
            many()
            assert len(set(small)) == len(set(large)) == 1
        assert fake_cuda.live == 0
        if not struck:
            assert n > 8
            return
    raise AssertionError("it never succeeds")


def test_a_full_device_is_said_with_numbers(fake_cuda: FakeCuda) -> None:
    with opened() as handle:
        results: list[bytes] = []
        caller(handle, MIXED, rows(13), results)()
        fake_cuda.set_memory(fake_cuda.memory_used + 1_900_000)
        too_many = caller(handle, MIXED, rows(10_000), results)
        words = r"results of products needs \d+ bytes of device memory and \d+ bytes are free"
        with pytest.raises(native.NativeError, match=words):
            too_many()
        # twice of what there was does not fit, and what is needed does
        caller(handle, MIXED, rows(5_000), results)()
        caller(handle, MIXED, rows(13), results)()
        assert results[0] == results[-1]


@pytest.mark.parametrize("late", [False, True])
def test_the_device_is_lost(fake_cuda: FakeCuda, late: bool) -> None:
    for n in range(1, 100):
        handle = opened()
        act = caller(handle, MIXED, rows(13), [])
        if late:
            fake_cuda.fail_async(n)
        else:
            fake_cuda.fail_at(n, ILLEGAL_ADDRESS)
        status = status_of(act)
        struck = not fake_cuda.fault_pending
        if struck and status != abi.OK:
            assert status == abi.LOST
            assert status_of(act) == abi.LOST
        native.destroy(handle)
        assert fake_cuda.live == 0
        fake_cuda.reset()
        if not struck:
            assert n > 3
            return
    raise AssertionError("it never succeeds")


def test_what_c_alone_can_say(fake_cuda: FakeCuda) -> None:
    """NULL, extents and sizes of structs that Python never gives."""
    with opened() as handle:
        call = load().vcuda_dev_gemm_fused
        x, y = rows(2), np.full(2 * N, POISON)
        p = Products([Product(1, 1, N), Product(1, 1, N, first=1, y=N)])
        at, to = x.ctypes.data, y.ctypes.data
        for arguments, words in (
            ((None, 1, at, 2, K, to, y.size), "'products' is NULL"),
            ((p.array, 2, None, 2, K, to, y.size), "'x' is NULL"),
            ((p.array, 2, at, 2, K, None, y.size), "'y' is NULL"),
            ((p.array, 0, at, 2, K, to, y.size), "count is 0; it must be 1 to"),
            ((p.array, -1, at, 2, K, to, y.size), "count is -1"),
            ((p.array, 2, at, 0, K, to, y.size), "x_rows is 0"),
            ((p.array, 2, at, 1 << 40, K, to, y.size), "x_rows is 1099511627776"),
            ((p.array, 2, at, 2, 0, to, y.size), "k is 0"),
            ((p.array, 2, at, 2, 1 << 40, to, y.size), "k is 1099511627776"),
            ((p.array, 2, at, 2, K, to, 0), "y_floats is 0"),
            ((p.array, 2, at, 2, K, to, 1 << 62), "y_floats is 4611686018427387904"),
        ):
            with pytest.raises(native.NativeError, match=words) as caught:
                call(handle.pointer, *arguments)
            assert caught.value.status == abi.NOT_DONE
        size = ctypes.sizeof(abi.ProductStruct)
        for i, wrong in ((0, 0), (0, size - 8), (0, size + 8), (1, size + 8)):
            p.array[i].struct_size = wrong
            with pytest.raises(
                native.NativeError, match=rf"products\[{i}\].struct_size is {wrong}"
            ):
                call(handle.pointer, p.array, 2, at, 2, K, to, y.size)
            p.array[i].struct_size = size
        np.testing.assert_array_equal(y, POISON)
        call(handle.pointer, p.array, 2, at, 2, K, to, y.size)
        assert np.isfinite(y).all()


@pytest.mark.parametrize("order", [1, 11, 12])
def test_nothing_depends_on_the_order(fake_cuda: FakeCuda, order: int) -> None:
    with opened() as handle:
        results: list[bytes] = []
        act = caller(handle, MIXED, rows(13), results)
        act()
        fake_cuda.schedule(order)
        fake_cuda.lazy(True)
        act()
        assert results[0] == results[1]
