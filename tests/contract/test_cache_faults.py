"""Faults of the CUDA runtime while weights go into the cache, and limits of its memory.

Whichever runtime call fails: -1 changes nothing, and the same call then works.
"""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda import BAD_ALLOC, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, FakeCuda

from pykestrel import native
from pykestrel.native import abi
from pykestrel.native.weights import Proj

from .device_model import counters, each_failing_call, make, status_of

pytestmark = pytest.mark.usefixtures("clean_device")


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("error", [INVALID_VALUE, OUT_OF_MEMORY, BAD_ALLOC])
def test_cache_calls(fake_cuda: FakeCuda, error: int, lazy: bool) -> None:
    model = make("q4")
    with model.handle:
        fake_cuda.lazy(lazy)
        key = native.wkey(1, Proj.DOWN)
        matrix, rows = model.matrices[key], model.values[key]
        model.upload(key)  # buffers for uploads are there from now on
        wanted = native.cache_read(model.handle, key, 0, matrix.rows)
        native.cache_drop(model.handle, key)

        def stats() -> object:
            s = native.cache_stats(model.handle)
            return s.bytes, s.entries, s.pinned_bytes, s.uploads, counters(model)

        def begin() -> None:
            native.cache_begin(model.handle, key, matrix)

        def drop() -> None:
            native.cache_drop(model.handle, key)

        assert each_failing_call(fake_cuda, begin, drop, stats, error) >= 2
        begin()
        # Rows that were refused may be given again: they count as not given.
        given = 0

        def give() -> None:
            native.cache_rows(
                model.handle, key, matrix, given, rows[given : given + 4], source="f32"
            )

        def next_rows() -> None:
            nonlocal given
            given += 4
            if given + 4 > matrix.rows:
                native.cache_drop(model.handle, key)
                begin()
                given = 0

        assert each_failing_call(fake_cuda, give, next_rows, stats, error) >= 4
        native.cache_drop(model.handle, key)
        model.upload(key)
        codes, scales = native.cache_read(model.handle, key, 0, matrix.rows)
        assert np.array_equal(codes, wanted[0])
        assert scales is not None
        assert wanted[1] is not None
        assert np.array_equal(scales, wanted[1])


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_in_pieces(fake_cuda: FakeCuda, lazy: bool) -> None:
    """More pieces than staging buffers, each sent as late as CUDA allows: none is overwritten."""
    model = make("q4")
    with model.handle:
        fake_cuda.lazy(lazy)
        key = native.wkey(1, Proj.FUSED_QKV)
        matrix, rows = model.matrices[key], model.values[key]
        model.upload(key)
        codes, scales = native.cache_read(model.handle, key, 0, matrix.rows)
        native.cache_begin(model.handle, key, matrix)
        for row in reversed(range(0, matrix.rows, 8)):
            piece = rows[row : row + 8].copy()
            native.cache_rows(model.handle, key, matrix, row, piece, source="f32")
            piece[:] = np.nan  # the caller's memory is its own again
        native.cache_end(model.handle, key)
        again, scales_again = native.cache_read(model.handle, key, 0, matrix.rows)
        assert np.array_equal(again, codes)
        assert scales is not None
        assert scales_again is not None
        assert np.array_equal(scales_again, scales)


@pytest.mark.parametrize("error", [INVALID_VALUE, ILLEGAL_ADDRESS])
def test_cache_end(fake_cuda: FakeCuda, error: int) -> None:
    """An end that a fault stops changes nothing; it may be tried again."""
    key_of = lambda: native.wkey(0, Proj.O)  # noqa: E731 - the library must be loaded first
    for n in range(1, 100):
        model = make("q8")
        with model.handle:
            key = key_of()
            matrix = model.matrices[key]
            native.cache_begin(model.handle, key, matrix)
            native.cache_rows(model.handle, key, matrix, 0, model.values[key], source="f32")
            fake_cuda.fail_at(n, error)
            status = status_of(lambda m=model, k=key: native.cache_end(m.handle, k))
            struck = not fake_cuda.fault_pending
            fake_cuda.fail_at(0)
            if (
                status == abi.NOT_DONE
            ):  # as it was before: not found, and the end may be tried again
                assert status_of(lambda m=model, k=key: native.cache_find(m.handle, k)) == -1
                native.cache_end(model.handle, key)
                assert native.cache_find(model.handle, key) == matrix
            elif status != abi.OK:
                assert error == ILLEGAL_ADDRESS
                assert status_of(lambda m=model, k=key: native.cache_find(m.handle, k)) == abi.LOST
        fake_cuda.reset()
        if not struck:
            assert n > 1
            return
    raise AssertionError("it never succeeds")


def test_budget(fake_cuda: FakeCuda) -> None:
    model = make("q8")
    with model.handle:
        keys = [native.wkey(0, p) for p in (Proj.FUSED_QKV, Proj.O, Proj.DOWN)]
        sizes = [native.cache_size(model.matrices[key]) for key in keys]
        native.cache_budget(model.handle, sum(sizes[:2]) - 1)  # one byte short
        model.upload(keys[0])
        with pytest.raises(native.NativeError, match=r"\d+.*\d+") as caught:
            native.cache_begin(model.handle, keys[1], model.matrices[keys[1]])
        assert caught.value.status == abi.NOT_DONE
        assert native.cache_stats(model.handle).entries == 1
        native.cache_budget(model.handle, sum(sizes[:2]))
        model.upload(keys[1])
        with pytest.raises(native.NativeError):  # the pinned entries alone are over it
            native.cache_budget(model.handle, sizes[0])

        native.cache_pin(model.handle, keys[0], False)
        native.cache_pin(model.handle, keys[1], False)
        native.cache_find(model.handle, keys[0])  # the other one is the older one now
        native.cache_budget(model.handle, sizes[0] + sizes[2])
        stats = native.cache_stats(model.handle)
        if stats.entries == 2:  # both still fit
            model.upload(keys[2])
        else:
            assert status_of(lambda: native.cache_find(model.handle, keys[1])) == abi.NOT_DONE
        assert native.cache_find(model.handle, keys[0]) == model.matrices[keys[0]]
        assert native.cache_stats(model.handle).bytes <= sizes[0] + sizes[2]


def test_every_key_can_be_evicted(fake_cuda: FakeCuda) -> None:
    matrix = native.Matrix("q8", 1, 8, 64)
    with native.create(0) as handle:
        for key in (0, (1 << 64) - 1, native.wkey(-1, -1)):
            native.cache_fill(handle, key, matrix, pinned=False)
            native.cache_budget(handle, 1)
            assert native.cache_stats(handle).entries == 0
            native.cache_budget(handle, 0)


@pytest.mark.parametrize(
    ("row", "rows"), [((1 << 63) - 1, 1), (-(1 << 63), -1), (1, (1 << 63) - 1), (0, 9), (8, 1)]
)
def test_rows_that_are_not_there(fake_cuda: FakeCuda, row: int, rows: int) -> None:
    """Numbers whose sum is no 64-bit integer are named as they were given."""
    words = rf"^vcuda_cache_\w+: {rows} rows from row {row} of the weight .* \[0, 8\)$"
    memory = np.zeros((8, 64), np.float32)
    with native.create(0) as handle:
        native.cache_begin(handle, 0, native.Matrix("f32", 1, 8, 64))
        lib = native.loader.load()
        with pytest.raises(native.NativeError, match=words):
            lib.vcuda_cache_rows(handle.pointer, 0, row, rows, abi.F32, memory.ctypes.data, None)
        native.cache_rows(handle, 0, native.Matrix("f32", 1, 8, 64), 0, memory)
        native.cache_end(handle, 0)
        with pytest.raises(native.NativeError, match=words):
            lib.vcuda_cache_read(handle.pointer, 0, row, rows, memory.ctypes.data, None)


def test_device_memory_runs_out(fake_cuda: FakeCuda) -> None:
    """Out of memory says what is needed and what is free; what is there lives on."""
    model = make("q8")
    with model.handle:
        keys = list(model.matrices)
        model.upload(keys[0])
        size = native.cache_size(model.matrices[keys[1]])
        fake_cuda.set_memory(fake_cuda.memory_used + size - 1)
        with pytest.raises(native.NativeError, match="free") as caught:
            native.cache_begin(model.handle, keys[1], model.matrices[keys[1]])
        assert caught.value.status == abi.NOT_DONE
        assert native.cache_find(model.handle, keys[0]) == model.matrices[keys[0]]
        native.cache_pin(model.handle, keys[0], False)  # may be evicted now
        native.cache_begin(model.handle, keys[1], model.matrices[keys[1]])
        assert native.cache_stats(model.handle).evictions == 1
