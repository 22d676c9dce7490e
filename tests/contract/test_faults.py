"""Faults of the CUDA runtime, each call failing in turn: -1 changes nothing, below -1 is for good.

Everything runs on the emulated runtime with models of a few thousand weights.
"""

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
    counters,
    counters_of_runs,
    each_failing_call,
    make,
    ready,
    status_of,
)

OUTS = {
    "logits": abi.OUT_LOGITS,
    "all": abi.OUT_ALL_LOGITS,
    "greedy": abi.OUT_GREEDY,
    "top": abi.OUT_TOP,
    "none": abi.OUT_NONE,
}


pytestmark = pytest.mark.usefixtures("clean_device")


# ---- setting decoding up ------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("error", [INVALID_VALUE, OUT_OF_MEMORY, BAD_ALLOC])
def test_decode_init(fake_cuda: FakeCuda, error: int, experts: int) -> None:
    model = make(experts=experts)
    with model.handle:

        def init() -> None:
            native.dev_decode_init(model.handle, model.config)

        def free() -> None:
            native.dev_decode_free(model.handle)

        calls = each_failing_call(fake_cuda, init, free, lambda: counters(model), error)
        assert calls > 15


def test_decode_size_is_what_it_takes(fake_cuda: FakeCuda) -> None:
    for kv in ("int8", "f16", "f32"):
        for experts in (0, 4):
            model = make(kv=kv, experts=experts, prefill_rows=5 if kv == "f16" else 0)
            with model.handle:
                model.upload_all()
                used, live = fake_cuda.memory_used, fake_cuda.live
                size = native.decode_size(model.config)
                fake_cuda.set_memory(used + size - 1)
                with pytest.raises(native.NativeError, match="free"):
                    native.dev_decode_init(model.handle, model.config)
                assert (fake_cuda.memory_used, fake_cuda.live) == (used, live)
                fake_cuda.set_memory(used + size)
                native.dev_decode_init(model.handle, model.config)
                assert fake_cuda.memory_used <= used + size
                for out in OUTS.values():
                    model.run([1, 2], out)
                native.dev_decode_init(model.handle, model.config)  # the earlier one makes room
                native.dev_decode_free(model.handle)
                assert fake_cuda.memory_used == used
            fake_cuda.reset()


# ---- running ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("out", OUTS)
def test_decode_run(fake_cuda: FakeCuda, out: str, graph: bool, lazy: bool) -> None:
    """Position and K/V stay, and the same call then gives the same result."""
    model = ready(experts=4 if out == "logits" else 0, graph=graph)
    fake_cuda.lazy(lazy)
    with model.handle:
        model.run([7, 8, 9])
        kept = model.kv_bytes(3)
        wanted = model.run([3, 5], OUTS[out])
        native.kv_seek(model.handle, 3)
        results: list[Any] = []

        def run() -> None:
            results.append(model.run([3, 5], OUTS[out]))

        def back() -> None:
            native.kv_seek(model.handle, 3)

        def state() -> object:
            return native.kv_position(model.handle), model.kv_bytes(3), counters_of_runs(model)

        calls = each_failing_call(fake_cuda, run, back, state, INVALID_VALUE)
        assert calls >= (5 if graph else 20)
        assert model.kv_bytes(3) == kept
        assert len(results) >= calls - 4
        for result in results:
            assert np.array_equal(result, wanted)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    "name", ["kv_read", "kv_write", "gemm", "logits", "cache_read", "cache_fill", "traced", "timed"]
)
def test_other_calls(fake_cuda: FakeCuda, name: str, lazy: bool) -> None:
    """What reads, writes and measures: nothing changed after -1, and then it works."""
    model = ready(experts=4)
    handle, config = model.handle, model.config
    with handle:
        fake_cuda.lazy(lazy)
        model.run([7, 8, 9])
        other = native.kv_read(handle, config, 0, 0, 3)
        key = native.wkey(1, Proj.DOWN)
        x = np.ones((2, model.matrices[key].k), np.float32)
        new = native.wkey(77, Proj.O)
        step = native.Step(config.vocab)
        trace = np.zeros((1, native.trace_size(handle)), np.float32)
        seen: list[bytes] = []

        def act() -> None:
            if name == "kv_read":
                seen.append(native.kv_read(handle, config, 1, 0, 3).k.tobytes())
            elif name == "kv_write":
                # At the position and above, where no row counts yet. A write that is stopped may
                # have written a part.
                native.kv_write(handle, config, 1, 3, other)
                seen.append(native.kv_read(handle, config, 1, 3, 6).k.tobytes())
            elif name == "gemm":
                seen.append(native.dev_gemm(handle, key, x, 3).tobytes())
            elif name == "logits":
                seen.append(native.dev_decode_logits(handle, config.vocab).tobytes())
            elif name == "cache_read":
                seen.append(native.cache_read(handle, key, 0, 40)[0].tobytes())
            elif name == "cache_fill":
                native.cache_fill(handle, new, native.Matrix("q4", 2, 40, 64), seed=3)
                seen.append(native.cache_read(handle, new, 0, 80)[0].tobytes())
                native.cache_drop(handle, new)
            elif name == "traced":
                native.dev_decode_run(handle, step, 3, [5], abi.OUT_NONE, trace=trace)
                seen.append(trace.tobytes())
            else:
                native.dev_decode_run(handle, step, 3, [5], abi.OUT_GREEDY)
                seen.append(step.id.to_bytes(4, "little"))

        def undo() -> None:
            if name in ("traced", "timed"):
                native.kv_seek(handle, 3)
            elif name == "cache_fill" and status_of(lambda: native.cache_find(handle, new)) == 0:
                native.cache_drop(handle, new)  # the reading behind it failed

        def state() -> object:
            if name == "cache_fill":
                undo()
            return native.kv_position(handle), model.kv_bytes(3), counters_of_runs(model)[0]

        native.prof_timing(handle, name == "timed")
        act()  # what is made on first use is there
        undo()
        assert each_failing_call(fake_cuda, act, undo, state, INVALID_VALUE) > 2
        assert len(set(seen)) <= 1


def test_first_decode_run(fake_cuda: FakeCuda) -> None:
    """The run that captures the graph: each call of the capture may fail."""
    wanted = None
    for n in range(1, 200):
        model = ready()
        with model.handle:
            fake_cuda.fail_at(n)
            status = status_of(lambda m=model: m.run([3, 5]))
            struck = not fake_cuda.fault_pending
            fake_cuda.fail_at(0)
            if status != abi.OK:
                assert status == abi.NOT_DONE
                assert native.kv_position(model.handle) == 0
                result = model.run([3, 5])
            else:
                native.kv_seek(model.handle, 0)
                result = model.run([3, 5])
            if wanted is None:
                wanted = result
            assert np.array_equal(result, wanted), n
        if not struck:
            assert n > 30
            return
    raise AssertionError("it never succeeds")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("graph", [True, False])
def test_the_device_is_lost(fake_cuda: FakeCuda, graph: bool, late: bool) -> None:
    """Whichever call loses the device: -2, from then on for everything, and destroy still works."""
    for n in range(1, 200, 1 if graph or late else 3):
        model = ready(graph=graph)
        model.run([1])
        if late:
            fake_cuda.fail_async(n)
        else:
            fake_cuda.fail_at(n, ILLEGAL_ADDRESS)
        status = status_of(lambda m=model: m.run([3, 5]))
        struck = not fake_cuda.fault_pending
        if struck and status != abi.OK:
            assert status == abi.LOST
            for call in (
                lambda m=model: m.run([3]),
                lambda m=model: native.cache_stats(m.handle),
                lambda m=model: native.dev_decode_free(m.handle),
                lambda m=model: native.prof_read(m.handle),
            ):
                assert status_of(call) == abi.LOST
        native.destroy(model.handle)
        assert fake_cuda.live == 0
        fake_cuda.reset()
        if not struck:
            assert n > (1 if late else 4)
            return
    raise AssertionError("it never succeeds")


def test_each_weight_is_missed(fake_cuda: FakeCuda) -> None:
    for experts in (0, 4):
        model = ready(experts=experts)
        with model.handle:
            wanted = model.run([1, 2])
            kept = model.kv_bytes(2)
            for key in model.matrices:
                native.cache_drop(model.handle, key)
                launched = fake_cuda.calls
                with pytest.raises(native.NativeError, match=r"is not in the cache.*1 of \d+") as e:
                    model.run([3])
                assert e.value.status == abi.NOT_DONE
                assert fake_cuda.calls - launched < 8  # nothing was submitted
                assert native.kv_position(model.handle) == 2
                assert model.kv_bytes(2) == kept
                model.upload(key)
                native.kv_seek(model.handle, 0)
                assert np.array_equal(model.run([1, 2]), wanted)


def test_a_weight_of_another_shape(fake_cuda: FakeCuda) -> None:
    model = ready()
    with model.handle:
        key = native.wkey(0, Proj.O)
        m = model.matrices[key]
        native.cache_drop(model.handle, key)
        native.cache_fill(model.handle, key, native.Matrix(m.kind, 1, m.n, m.k + 32))
        assert status_of(lambda: model.run([3])) == abi.NOT_DONE
        # another kind of the right shape is fine: the graph is made anew for it
        native.cache_drop(model.handle, key)
        native.cache_fill(model.handle, key, native.Matrix("bf16", 1, m.n, m.k))
        model.run([3])


def test_the_context_is_full(fake_cuda: FakeCuda) -> None:
    model = ready(ctx_size=5)
    with model.handle:
        assert status_of(lambda: model.run([1] * 6)) == abi.NOT_DONE
        model.run([1] * 4)
        with pytest.raises(native.NativeError, match="5") as caught:
            model.run([1, 2])
        assert caught.value.status == abi.NOT_DONE
        assert native.kv_position(model.handle) == 4
        model.run([2])
        assert status_of(lambda: model.run([3])) == abi.NOT_DONE
        assert native.kv_position(model.handle) == 5
        native.kv_seek(model.handle, 4)
        model.run([2])


def test_calls_that_cannot_be_right(fake_cuda: FakeCuda) -> None:
    model = ready()
    with model.handle:
        step = native.Step(model.config.vocab)
        run = native.dev_decode_run
        logits = np.zeros(model.config.vocab, np.float32)
        for position, ids, out in (
            (1, [1], abi.OUT_NONE),  # not where the handle is
            (0, [], abi.OUT_NONE),
            (0, [-1], abi.OUT_NONE),
            (0, [model.config.vocab], abi.OUT_NONE),
            (0, [1], 5),
            (0, [1], -1),
        ):
            calls = fake_cuda.calls
            with pytest.raises(native.NativeError) as caught:
                run(model.handle, step, position, ids, out, logits=logits)
            assert caught.value.status == abi.NOT_DONE
            assert fake_cuda.calls - calls < 4
        native.dev_decode_free(model.handle)
        assert status_of(lambda: run(model.handle, step, 0, [1], abi.OUT_NONE)) == abi.NOT_DONE
        assert status_of(lambda: native.kv_position(model.handle)) == abi.NOT_DONE


def test_k_v_too_large_to_be_numbered_are_refused(fake_cuda: FakeCuda) -> None:
    """The kernels count a layer's keys in eights, with 32 bits."""
    model = make()
    with model.handle:
        rows = {"heads": 64, "kv_heads": 64, "head_dim": 256}
        layers = [native.Layer(layer.input_norm, layer.post_norm) for layer in model.config.layers]
        config = replace(model.config, layers=layers, **rows, ctx_size=(1 << 21) - 1)
        assert native.decode_size(config) > 1 << 36
        with pytest.raises(native.NativeError, match="at most 2097151 positions"):
            native.decode_size(replace(config, ctx_size=1 << 21))


def test_a_logit_that_is_not_finite(fake_cuda: FakeCuda) -> None:
    model = ready("bf16")
    with model.handle:
        model.run([1, 2])
        kept = model.kv_bytes(2)
        key = native.wkey(native.HEAD_LAYER, Proj.HEAD)
        native.cache_drop(model.handle, key)
        matrix = model.matrices[key]
        bits = np.zeros((matrix.rows, matrix.k), np.uint16)
        bits[17, 3] = 0x7F80  # infinite
        native.cache_begin(model.handle, key, matrix)
        native.cache_rows(model.handle, key, matrix, 0, bits)
        native.cache_end(model.handle, key)
        step = native.Step(model.config.vocab)
        for out in (abi.OUT_GREEDY, abi.OUT_TOP):
            with pytest.raises(native.NativeError) as caught:
                native.dev_decode_run(model.handle, step, 2, [3], out, top=4)
            assert caught.value.status == abi.NOT_DONE
            assert step.nonfinite
        assert native.kv_position(model.handle) == 2
        assert model.kv_bytes(2) == kept
        native.cache_drop(model.handle, key)
        model.upload(key)
        model.run([3])


@pytest.mark.parametrize(
    ("proj", "size"),
    [
        (Proj.EMBED, 1e30),  # the squares of the norms after these overflow
        (Proj.O, 1e30),
        (Proj.DOWN, 1e30),
        (Proj.FUSED_QKV, 1e30),  # and those of q's
        (Proj.ROUTER, np.inf),  # its expert alone, or never
        (Proj.ROUTER, -np.inf),
    ],
)
def test_what_overflows_shows(fake_cuda: FakeCuda, proj: Proj, size: float) -> None:
    """The sum of squares is infinite where no element is, and a factor of 0 would hide it."""
    model = ready("bf16", experts=4)
    with model.handle:
        layer = native.HEAD_LAYER if proj == Proj.EMBED else 1 if proj == Proj.ROUTER else 0
        key = native.wkey(layer, proj)
        values = model.values[key].copy()
        values[3, 5] = size
        model.values[key] = values
        native.cache_drop(model.handle, key)
        model.upload(key)
        with pytest.raises(native.NativeError, match="NaN or infinite"):
            model.run([3, 3], abi.OUT_GREEDY)
        assert native.kv_position(model.handle) == 0


# ---- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q8", "q4", "bf16"])
def test_nothing_depends_on_the_order(fake_cuda: FakeCuda, kind: str) -> None:
    """Blocks and threads in any order, work early or late, graph or not: the same bits."""
    wanted: dict[tuple[str, int], Any] = {}
    for order, lazy, graph in (
        (0, False, True),
        (1, True, False),
        (11, False, False),
        (12, True, True),
    ):
        fake_cuda.schedule(order)
        fake_cuda.lazy(lazy)
        for experts in (0, 4):
            model = ready(kind, experts=experts, graph=graph)
            with model.handle:
                for out in OUTS:
                    result = model.run([3, 5], OUTS[out])
                    key = (out, experts)
                    assert np.array_equal(result, wanted.setdefault(key, result)), (key, order)
