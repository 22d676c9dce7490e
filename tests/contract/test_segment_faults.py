"""A segment of layers on a device whose calls fail in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_cuda import BAD_ALLOC, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, FakeCuda

from pykestrel import native
from pykestrel.native import abi
from pykestrel.native.weights import Proj

from .device_model import (
    DeviceModel,
    counters,
    counters_of_runs,
    each_failing_call,
    make,
    status_of,
)

pytestmark = pytest.mark.usefixtures("clean_device")


def segment(kind: str = "q8", **options: Any) -> DeviceModel:
    """Both layers of the model as a segment, without embedding and head; not set up yet."""
    model = make(kind, **options)
    for proj in (Proj.EMBED, Proj.HEAD):
        del model.matrices[native.wkey(native.HEAD_LAYER, proj)]
    model.config = replace(model.config, segment=True, vocab=0, final_norm=None)
    return model


def ready(kind: str = "q8", **options: Any) -> DeviceModel:
    model = segment(kind, **options)
    model.upload_all()
    native.dev_decode_init(model.handle, model.config)
    return model


def rows(count: int) -> Any:
    return np.random.default_rng(count).standard_normal((count, 64)).astype(np.float32)


def run(model: DeviceModel, hidden: Any) -> None:
    native.dev_layers_run(model.handle, native.kv_position(model.handle), hidden)


@pytest.mark.parametrize("error", [INVALID_VALUE, OUT_OF_MEMORY, BAD_ALLOC])
def test_decode_init(fake_cuda: FakeCuda, error: int) -> None:
    model = segment(experts=4, prefill_rows=3)
    with model.handle:

        def init() -> None:
            native.dev_decode_init(model.handle, model.config)

        def free() -> None:
            native.dev_decode_free(model.handle)

        assert each_failing_call(fake_cuda, init, free, lambda: counters(model), error) > 15


def test_decode_size_is_what_it_takes(fake_cuda: FakeCuda) -> None:
    for kv, chunk in (("int8", 0), ("f16", 5), ("f32", 24)):
        model = segment(kv=kv, experts=4, prefill_rows=chunk)
        with model.handle:
            model.upload_all()
            used = fake_cuda.memory_used
            size = native.decode_size(model.config)
            fake_cuda.set_memory(used + size - 1)
            with pytest.raises(native.NativeError, match="free"):
                native.dev_decode_init(model.handle, model.config)
            fake_cuda.set_memory(used + size)
            native.dev_decode_init(model.handle, model.config)
            run(model, rows(7))
            run(model, rows(1))
            assert fake_cuda.memory_used <= used + size
        fake_cuda.reset()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("count", "chunk", "graph"),
    [(1, 3, True), (3, 0, True), (3, 0, False), (5, 3, True)],
)
def test_each_failing_call(
    fake_cuda: FakeCuda, count: int, chunk: int, graph: bool, lazy: bool
) -> None:
    """The rows, the position and the K/V stay, and the same call then gives the same result."""
    model = ready(experts=4, prefill_rows=chunk, graph=graph)
    fake_cuda.lazy(lazy)
    with model.handle:
        run(model, rows(2))
        kept = model.kv_bytes(2)
        given = rows(count)
        wanted = given.copy()
        run(model, wanted)
        assert not np.array_equal(wanted, given)
        native.kv_seek(model.handle, 2)
        hidden = given.copy()
        results: list[Any] = []

        def act() -> None:
            run(model, hidden)
            results.append(hidden.copy())

        def back() -> None:
            native.kv_seek(model.handle, 2)
            hidden[...] = given

        def state() -> object:
            position = native.kv_position(model.handle)
            return hidden.tobytes(), position, model.kv_bytes(2), counters_of_runs(model)

        calls = each_failing_call(fake_cuda, act, back, state, INVALID_VALUE)
        assert calls >= (4 if count == 1 else 10)
        assert model.kv_bytes(2) == kept
        assert len(results) >= calls - 4
        for result in results:
            assert np.array_equal(result, wanted)


@pytest.mark.parametrize("again", [False, True])
def test_the_first_run(fake_cuda: FakeCuda, again: bool) -> None:
    """Each call of what captures the graph, also after a chunk that float16 could not hold."""
    given = rows(4 if again else 1)
    wanted = None
    for n in range(1, 300):
        model = ready(prefill_rows=4)
        with model.handle:
            hidden = given * np.float32(1e30 if again else 1)
            before = hidden.copy()
            fake_cuda.fail_at(n)
            status = status_of(lambda m=model, h=hidden: run(m, h))
            struck = not fake_cuda.fault_pending
            fake_cuda.fail_at(0)
            if status != abi.OK:
                assert status == abi.NOT_DONE
                assert native.kv_position(model.handle) == 0
                assert np.array_equal(hidden, before)
                run(model, hidden)
            wanted = hidden if wanted is None else wanted
            assert np.array_equal(hidden, wanted, equal_nan=True), n
        if not struck:
            assert n > 20
            return
    raise AssertionError("it never succeeds")


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("late", [False, True])
def test_the_device_is_lost(fake_cuda: FakeCuda, late: bool, chunk: int) -> None:
    for n in range(1, 200, 1 if late else 3):
        model = ready(prefill_rows=chunk)
        run(model, rows(1))
        given = rows(4)
        hidden = given.copy()
        if late:
            fake_cuda.fail_async(n)
        else:
            fake_cuda.fail_at(n, ILLEGAL_ADDRESS)
        status = status_of(lambda m=model, h=hidden: run(m, h))
        struck = not fake_cuda.fault_pending
        if struck and status != abi.OK:
            assert status == abi.LOST
            assert np.array_equal(hidden, given)
            assert status_of(lambda m=model: run(m, rows(1))) == abi.LOST
        native.destroy(model.handle)
        assert fake_cuda.live == 0
        fake_cuda.reset()
        if not struck:
            assert n > 1
            return
    raise AssertionError("it never succeeds")


@pytest.mark.parametrize("kind", ["q8", "bf16"])
def test_nothing_depends_on_the_order(fake_cuda: FakeCuda, kind: str) -> None:
    """Blocks and threads in any order, work early or late, graph or not: the same bits."""
    wanted: dict[tuple[int, int], Any] = {}
    for order, lazy, graph in (
        (0, False, True),
        (1, True, False),
        (11, False, False),
        (12, True, True),
    ):
        fake_cuda.schedule(order)
        fake_cuda.lazy(lazy)
        for experts in (0, 4):
            model = ready(kind, experts=experts, graph=graph, prefill_rows=4)
            with model.handle:
                for count in (1, 6, 1):
                    hidden = rows(count)
                    run(model, hidden)
                    key = (experts, native.kv_position(model.handle))
                    assert np.array_equal(hidden, wanted.setdefault(key, hidden)), (key, order)
