"""Prompts in chunks on a device whose calls fail in turn."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from fake_cuda import INVALID_VALUE, FakeCuda

from pykestrel import native
from pykestrel.native import abi

from .device_model import counters_of_runs, each_failing_call, ready

pytestmark = pytest.mark.usefixtures("clean_device")


@pytest.mark.parametrize(
    ("out", "experts", "lazy"),
    [
        (abi.OUT_LOGITS, 0, False),
        (abi.OUT_ALL_LOGITS, 4, False),
        (abi.OUT_TOP, 0, True),
        (abi.OUT_NONE, 4, True),
    ],
)
def test_each_failing_call(fake_cuda: FakeCuda, out: int, experts: int, lazy: bool) -> None:
    """Five tokens in chunks of three: position and K/V stay, and the same call then gives the same
    result, whichever runtime call failed before."""
    model = ready(experts=experts, prefill_rows=3)
    fake_cuda.lazy(lazy)
    ids = [3, 5, 11, 4, 9]
    with model.handle:
        model.run([7, 8, 9], prefill=True)
        kept = model.kv_bytes(3)
        wanted = model.run(ids, out, prefill=True)
        native.kv_seek(model.handle, 3)
        results: list[Any] = []

        def run() -> None:
            results.append(model.run(ids, out, prefill=True))

        def back() -> None:
            native.kv_seek(model.handle, 3)

        def state() -> object:
            return native.kv_position(model.handle), model.kv_bytes(3), counters_of_runs(model)

        calls = each_failing_call(fake_cuda, run, back, state, INVALID_VALUE)
        assert calls >= 30  # two chunks of two layers, kernel by kernel
        assert model.kv_bytes(3) == kept
        assert len(results) >= calls - 4
        for result in results:
            assert np.array_equal(result, wanted)


def test_it_needs_its_buffers_and_gives_no_trace(fake_cuda: FakeCuda) -> None:
    for rows, words in ((0, "prefill_rows was 0"), (8, "step.trace must be NULL")):
        model = ready(prefill_rows=rows)
        with model.handle:
            step = native.Step(model.config.vocab)
            trace = np.zeros(native.trace_size(model.handle), np.float32)
            step._raw.trace = trace.ctypes.data
            ids = np.zeros(1, np.int32)
            step._raw.ids = ids.ctypes.data
            step._raw.count = 1
            before = counters_of_runs(model)
            load = native.loader.load()
            with pytest.raises(native.NativeError, match=words):
                load.vcuda_dev_prefill(model.handle.pointer, ctypes.byref(step._raw))
            assert counters_of_runs(model) == before
