"""How the CPU's engine lays matrices out: rows come back as they were, and how many blocks are
multiplied at a time, and by how many threads, changes no bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cpu_models import make_config, make_weights
from hypothesis import given
from hypothesis import strategies as st

from pykestrel.engine.cpu import Store, linear
from pykestrel.engine.cpu.blocks import (
    Filling,
    fillings,
    make_panels,
    room,
    row_ranges,
    transpose,
)
from pykestrel.engine.cpu.cache import WeightCache
from pykestrel.engine.cpu.linear import LAYING_OUT, Linear, Place, multiply, multiply_rows
from pykestrel.engine.cpu.moe import MoeLayer, mix_experts, route
from pykestrel.engine.cpu.workers import Workers
from pykestrel.errors import OutOfMemory
from pykestrel.quant import QTensor, dequantize, f32_to_bf16, quantize


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_embedding_of_a_tied_and_of_an_untied_model(quant: str, later: bool) -> None:
    """Rows read from the head's blocks, or from a head that is not laid out, are those of the
    matrix."""
    weights = make_weights(make_config(vocab_size=1200, hidden_size=50), quant)
    whole = Linear([weights.embed], None, Workers(2), Place("head"), later=later)
    for token in (0, 1, 511, 512, 1023, 1024, 1199):
        if quant == "bf16":
            want = (weights.embed[token].astype(np.uint32) << 16).view(np.float32)
        else:
            want = dequantize(weights.embed.rows(token, token + 1))[0]
        np.testing.assert_array_equal(whole.row(token), want)
    assert whole.laid_out != later


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("k", [50, 64])
def test_a_matrix_gives_its_rows_back(quant: str, k: int, later: bool) -> None:
    """As they were given: codes with their padding, scales, and bf16 bits, across blocks and
    parts, whether it is laid out yet or not."""
    weights = make_weights(make_config(vocab_size=1200, hidden_size=k), quant)
    other = make_weights(make_config(vocab_size=83, hidden_size=k), quant, seed=1)
    both = [weights.embed, other.embed]
    linear = Linear(both, None, Workers(2), Place("head"), later=later)
    assert linear.laid_out != later
    for lo, hi in ((0, 1), (5, 1283), (511, 514), (1199, 1201), (1282, 1283), (0, 1283)):
        got = linear.stored(lo, hi)
        if isinstance(got, QTensor):
            codes = np.concatenate([part.codes for part in both])[lo:hi]
            scales = np.concatenate([part.scales for part in both])[lo:hi]
            assert (got.kind, got.shape) == (quant, (hi - lo, k))
            assert got.codes.tobytes() == codes.tobytes()
            assert got.scales.tobytes() == scales.tobytes()
        else:
            assert got.tobytes() == np.concatenate(both)[lo:hi].tobytes()
    assert linear.laid_out != later


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_a_matrix_that_a_device_was_to_compute_is_laid_out_when_it_is_multiplied(
    quant: str, rows: int
) -> None:
    store, workers = Store(), Workers(2)
    parts = [matrix(quant, n, 330) for n in (1100, 36)]
    now = Linear(parts, None, workers, Place("o"), store)
    taken = store.memory
    one = Linear(parts, None, workers, Place("o"), store, later=True)
    assert store.memory == 2 * taken
    x = np.random.default_rng(1).standard_normal((rows, 330), np.float32)
    y, want = np.full((2, rows, 1136), np.nan, np.float32)
    multiply(now, x, want, workers)
    multiply(one, x, y, workers)
    assert one.laid_out
    assert y.tobytes() == want.tobytes()
    assert store.memory == 2 * taken  # in the memory of the rows
    assert np.shares_memory(one.panels[0].codes, one._buffer)
    assert np.shares_memory(one.blocks[-1].codes, one._buffer)
    assert one.nbytes == now.nbytes


class Counted(Workers):
    """Tells how many items were given to it, and how many threads they were worth."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked: list[tuple[int, int | None]] = []

    def run(self, work: Any, items: Any, threads: int | None = None) -> None:
        self.asked.append((len(items), threads))
        super().run(work, items, threads)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_who_lays_out_what_is_needed_now(
    quant: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the experts of a token or a batch each one thread, several side by side; of a large matrix
    each thread a share."""
    monkeypatch.setattr(linear, "_LAID_OUT", 1 << 10)
    experts, workers = 6, Counted(4)
    layer = MoeLayer(
        router=np.random.default_rng(2).standard_normal((64, experts), np.float32),
        gate_up=[later(quant, 96, 64, "expert_gate_up", e) for e in range(experts)],
        down=[later(quant, 64, 48, "expert_down", e) for e in range(experts)],
        experts_per_token=2,
        norm_topk_prob=True,
    )
    x = np.random.default_rng(3).standard_normal((rows, 64), np.float32)
    chosen = np.unique(route(layer, x)[0])
    mix_experts(layer, x, np.empty_like(x), WeightCache(0, workers), workers)
    made = [(len(chosen), LAYING_OUT)] * 2  # of gate and up, and of down
    assert [asked for asked in workers.asked if asked[1] == LAYING_OUT] == made
    for e in range(experts):
        assert layer.gate_up[e].laid_out == layer.down[e].laid_out == (e in chosen)
    large, workers = later(quant, 2560, 64, "o"), Counted(4)
    multiply(large, x, np.empty((rows, 2560), np.float32), workers)
    assert workers.asked[0][0] == len(large.blocks) == 6
    assert LAYING_OUT > 4


def later(quant: str, n: int, k: int, kind: str, expert: int = -1) -> Linear:
    return Linear([matrix(quant, n, k)], None, Workers(1), Place(kind, 0, expert), later=True)


@pytest.mark.parametrize("what", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_a_layout_that_is_stopped_anywhere_is_made_the_next_time(
    quant: str, what: type[BaseException]
) -> None:
    """At every line: rows and products are right after it, and lie in one place."""
    parts = [matrix(quant, n, 64) for n in (600, 36)]
    workers = Workers(1)
    ready = Linear(parts, None, workers, Place("o", 3))
    x = np.ones((1, 64), np.float32)
    want, got = np.empty((2, 1, 636), np.float32)
    multiply(ready, x, want, workers)
    for stop in range(1, 10_000):
        one = Linear(parts, None, workers, Place("o", 3), later=True)
        if not stopped_at(stop, what, lambda one=one: one.lay_out(workers)):
            break
        np.testing.assert_array_equal(one.row(601), ready.row(601))
        multiply(one, x, got, workers)
        assert got.tobytes() == want.tobytes()
        assert np.shares_memory(one.panels[0].codes, one._buffer)
    assert stop > 100


def stopped_at(stop: int, what: type[BaseException], run: Callable[[], None]) -> bool:
    """Whether ``run`` has so many lines in linear.py and blocks.py; ``what`` is raised there."""
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("cpu/linear.py", "cpu/blocks.py")):
            return None
        if event == "line":
            lines += 1
            if lines == stop:
                raise what
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except (what, OutOfMemory):
        return True
    finally:
        sys.settrace(before)
    return False


def test_no_memory_for_a_layout_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    one = later("q8", 1000, 64, "o")

    def none(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Filling, "fill", none)
    with pytest.raises(OutOfMemory, match=r"laying out o of layer 0 needs [1-9][\d.]* [KM]B for a"):
        one.lay_out(Workers(1))


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_a_matrix_is_laid_out_in_few_calls_and_by_many_threads(quant: str) -> None:
    """Each call passes the GIL on, and there were 40 of them for an expert of 30B-A3B. What one
    thread lays out alone is one filling a part; of a large matrix every thread has some."""
    expert, large = [matrix(quant, 768, 256) for _ in range(2)], [matrix(quant, 4096, 256)]
    of_large = 4096 * {"bf16": 512, "q8": 256, "q4": 128}[quant]
    for parts, together, count in ((expert, 8 << 20, 2), (large, of_large // 4, 4), (large, 1, 8)):
        ranges = row_ranges(parts)
        panels = make_panels(ranges, 8, np.zeros(room(ranges, 8), np.uint8))
        found = list(fillings(ranges, panels, together))
        assert len(panels) == 1
        assert len(found) == count
        assert sum(one.part.shape[-2] for one in found) == sum(part.shape[-2] for part in parts)


@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 70),
    columns=st.integers(1, 90),
    dtype=st.sampled_from([np.int8, np.uint8, np.uint16, np.float16, np.float32, np.int64]),
    of_a_part=st.booleans(),
)
def test_transposed_matrices(
    batch: int, rows: int, columns: int, dtype: type[Any], of_a_part: bool
) -> None:
    draw = np.random.default_rng(rows)
    values = draw.integers(0, 100, (batch, rows + 3, columns + 5)).astype(dtype)
    part = values[:, 1 : rows + 1, 2 : columns + 2] if of_a_part else values
    flip = 0x88 if dtype is np.uint8 else 0
    out = np.full((batch, part.shape[2] + 2, part.shape[1] + 3), 77, dtype)
    inner = out[:, : part.shape[2], 1 : part.shape[1] + 1]
    transpose(part, inner, flip)
    want = part.transpose(0, 2, 1)
    assert (inner == (want ^ dtype(flip) if flip else want)).all()
    inner[...] = 77
    assert (out == 77).all()


def matrix(quant: str, n: int, k: int) -> Any:
    values = np.random.default_rng(n + k).standard_normal((n, k), np.float32)
    return f32_to_bf16(values) if quant == "bf16" else quantize(values, quant)


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("parts", [(7,), (512,), (1100, 36), (2600,)])
def test_how_the_blocks_are_shared_out_changes_no_bit(
    quant: str, parts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    k = 330
    one = Linear([matrix(quant, n, k) for n in parts], None, Workers(1), Place("o"))
    x = np.random.default_rng(1).standard_normal(k, np.float32)
    seen = set()
    monkeypatch.setattr(linear, "_ALONE", 0)
    for together in (1, 2, 4, 100):
        monkeypatch.setattr(linear, "_PANEL", together)
        for count in (1, 2, 5):
            workers = Workers(count)
            y = np.full(sum(parts), np.nan, np.float32)
            multiply_rows([(one, x, y)], workers)
            workers.close()
            seen.add(y.tobytes())
    assert len(seen) == 1
    want = np.array([one.row(i) @ x for i in range(sum(parts))])
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("quant", ["q8", "q4"])
def test_long_rows_are_not_unpacked_four_blocks_at_a_time(quant: str) -> None:
    """18,944 of them, as Qwen2.5-7B has, would be 39 MB a thread that no cache holds: 16 ms from q4
    on two cores, a block at a time 11.5."""
    n, k = 2048, 18944
    codes = np.ones((n, k if quant == "q8" else k // 2), np.uint8 if quant == "q4" else np.int8)
    q = QTensor(quant, (n, k), codes, np.ones((n, k // 32), np.float16))
    workers = Workers(1)
    one = Linear([q], None, workers, Place("down"))
    y = np.zeros(n, np.float32)
    multiply_rows([(one, np.ones(k, np.float32), y)], workers)
    np.testing.assert_array_equal(y, one.row(0).sum())
    assert workers.scratch.nbytes <= 12 << 20


@pytest.mark.parametrize(
    ("n", "wanted"), [(500, 1), (1100, 2), (2 * 3072, 2), (3 * 3072, 3), (100 * 3072, 16)]
)
def test_a_matrix_is_shared_by_as_many_threads_as_it_is_large(
    n: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's threads pass the GIL around: 16 of them take twice as long for 10 M codes as 4."""
    asked: list[int | None] = []

    class Asked(Workers):
        def run(self, work: Any, items: Any, threads: int | None = None) -> None:
            asked.append(threads)

    one = Linear([matrix("q4", 512, 1024)], None, Workers(1), Place("o"))
    one.n = n  # only its size is looked at
    multiply_rows([(one, np.zeros(1024, np.float32), np.zeros(n, np.float32))], Asked(16))
    assert asked == [wanted]


def test_small_matrices_share_memory_and_none_of_it() -> None:
    store = Store()
    taken = [store.take(nbytes) for nbytes in (1, 64, 1000, 3 << 20, 9 << 20, 0, 8 << 20) * 5]
    for i, part in enumerate(taken):
        part[:] = i
    assert all((part == i).all() for i, part in enumerate(taken))
    assert store.memory == sum(part.nbytes for part in taken)
