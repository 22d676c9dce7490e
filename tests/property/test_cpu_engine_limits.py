"""The CPU engine where things go wrong: limits, NaN, interrupts, memory, threads."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from cpu_models import engine_of, make_config, make_weights, moe_config

from pykestrel.engine.cpu import CpuEngine, check_memory, engine, linear, memory, memory_needed
from pykestrel.engine.cpu.workers import Scratch, Workers
from pykestrel.errors import ContextError, NumericsError, OutOfMemory, UsageError

NAN = 0x7FC0  # as bf16


def same(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# ---- the context's edge and misuse


def test_the_context_can_be_filled_to_the_last_position() -> None:
    model = engine_of(make_weights(make_config()), ctx_size=33)
    model.forward(list(range(32)))
    model.forward([1])
    assert model.position == 33
    with pytest.raises(ContextError, match=r"1 tokens after 33 do not fit the context of 33"):
        model.forward([1])
    assert model.position == 33


def test_a_prompt_that_does_not_fit_changes_nothing() -> None:
    weights = make_weights(make_config())
    model = engine_of(weights, ctx_size=10)
    model.forward([1, 2, 3])
    with pytest.raises(ContextError, match="8 tokens after 3"):
        model.forward([0] * 8)
    assert model.position == 3
    same(model.forward([4]), engine_of(weights).forward([1, 2, 3, 4]))


@pytest.mark.parametrize("ids", [[], [[1, 2]], [80], [-1], [3, 81, 4]])
def test_ids_that_make_no_sense(ids: Any) -> None:
    model = engine_of(make_weights(make_config()))
    with pytest.raises(UsageError, match=r"token id|one or more"):
        model.forward(ids)
    assert model.position == 0


@pytest.mark.parametrize("position", [-1, 4, 100])
def test_truncate_to_nowhere(position: int) -> None:
    model = engine_of(make_weights(make_config()))
    model.forward([1, 2, 3])
    with pytest.raises(UsageError, match="the sequence has 3 tokens"):
        model.truncate(position)
    assert model.position == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv": "fp8"}, "kv is 'fp8'"),
        ({"ctx_size": 0}, "ctx_size is 0"),
        ({"cpu_cache": -1}, "cpu_cache is -1"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        engine_of(make_weights(make_config()), **options)


def test_close_frees_and_says_so() -> None:
    model = engine_of(make_weights(make_config()))
    model.forward([1])
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model.forward([1])
    with pytest.raises(UsageError, match="closed"):
        model.stats()


# ---- not a number


def broken(where: str, layer: int, value: int = NAN) -> Any:
    weights = make_weights(make_config(num_hidden_layers=3, tie_word_embeddings=False))
    target = weights if layer < 0 else weights.layers[layer]
    matrix = getattr(target, where).copy()
    matrix[0, 0] = value
    setattr(target, where, matrix)
    return weights


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    ("where", "block"),
    [
        ("q", "attention"),
        ("v", "attention"),
        ("o", "attention"),
        ("gate", "MLP"),
        ("down", "MLP"),
    ],
)
def test_a_nan_is_named_with_its_layer(count: int, layer: int, where: str, block: str) -> None:
    model = engine_of(broken(where, layer))
    # What the last layer's MLP broke is found where the logits are: in the last row.
    position = count - 1 if (layer, block) == (2, "MLP") else 0
    words = f"out of the {block} of layer {layer} at position {position};"
    with pytest.raises(NumericsError, match=words):
        model.forward([1] * count)
    assert model.position == 0


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_a_nan_in_a_key_is_found_whatever_stores_it(kv: str) -> None:
    model = engine_of(broken("k", 1), kv=kv)
    with pytest.raises(NumericsError, match="attention of layer 1"):
        model.forward([1, 2, 3])
    assert model.position == 0


def test_an_infinite_weight_is_found_too() -> None:
    model = engine_of(broken("up", 1, value=0x7F80))
    with pytest.raises(NumericsError, match="MLP of layer 1"):
        model.forward([1, 2, 3])


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("ids", [[1], [1, 2, 3]])
def test_a_head_too_large_to_be_normalised_is_found(where: str, ids: list[int]) -> None:
    model = engine_of(broken(where, 1, value=0x7149))  # 1e30: finite, but its square is not
    with pytest.raises(NumericsError, match="attention of layer 1"):
        model.forward(ids)
    assert model.position == 0


def test_a_nan_in_the_embedding_names_its_position() -> None:
    model = engine_of(broken("embed", -1))
    model.forward([1, 2])
    with pytest.raises(NumericsError, match="out of the embedding at position 4"):
        model.forward([3, 4, 0, 5])
    assert model.position == 2
    model.forward([3, 4, 5])


def test_a_nan_in_the_head() -> None:
    model = engine_of(broken("head", -1))
    for ids in ([1], [1, 2, 3]):
        with pytest.raises(NumericsError, match="logits at position"):
            model.forward(ids)
    assert model.position == 0


def test_a_nan_among_experts() -> None:
    weights = make_weights(moe_config())
    down = weights.layers[1].down.copy()
    down[:, 0, 0] = NAN
    weights.layers[1].down = down
    for ids in ([1], [1, 2, 3]):
        with pytest.raises(NumericsError, match="MLP of layer 1"):
            engine_of(weights).forward(ids)


def test_no_numpy_warning_escapes(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(NumericsError):
        engine_of(broken("q", 0), kv="int8").forward([1, 2])
    assert not recwarn.list


# ---- interrupts


class Stop(BaseException):
    """As KeyboardInterrupt: not an Exception."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop, RuntimeError])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("kv", ["int8", "f32"])
def test_an_interrupted_pass_has_not_happened(
    error: type[BaseException], at: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_weights(make_config(), "q8")
    model = engine_of(weights, kv=kv)
    model.forward([1, 2, 3])
    monkeypatch.setattr(engine, "_BATCH", 4)  # several batches: the first ones are complete
    attend, calls = engine.attend_many, 0

    def attend_and_stop(*args: Any) -> None:
        nonlocal calls
        calls += 1
        attend(*args)
        if calls == at:
            raise error

    monkeypatch.setattr(engine, "attend_many", attend_and_stop)
    with pytest.raises(error):
        model.forward(list(range(10, 30)))
    assert model.position == 3
    monkeypatch.setattr(engine, "attend_many", attend)
    fresh = engine_of(weights, kv=kv)
    fresh.forward([1, 2, 3])
    same(model.forward([4, 5]), fresh.forward([4, 5]))
    same(model.forward([6]), fresh.forward([6]))


def test_an_interrupt_while_kv_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have the larger buffer then, and some the old one."""
    weights = make_weights(make_config(num_hidden_layers=3))
    model = engine_of(weights, ctx_size=2000)
    model.forward([1] * 250)
    real, calls = np.empty, 0

    def empty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", empty)
        with pytest.raises(KeyboardInterrupt):
            model.forward([2] * 100)
    assert model.position == 250
    fresh = engine_of(weights, ctx_size=2000)
    fresh.forward([1] * 250)
    same(model.forward([2] * 100), fresh.forward([2] * 100))


def test_memory_that_runs_out_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine_of(make_weights(make_config()))
    model.forward([1, 2])

    def fail(*_: Any) -> None:
        raise MemoryError("Unable to allocate 5 GiB")

    monkeypatch.setattr(engine, "rotate", fail)
    with pytest.raises(OutOfMemory, match=r"ran out of memory .*5 GiB.* try"):
        model.forward([3, 4, 5])
    assert model.position == 2


# ---- memory


def test_context_that_cannot_fit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = make_weights(make_config())
    monkeypatch.setattr(engine, "available_memory", lambda: 1_000_000)
    with pytest.raises(
        OutOfMemory, match=r"100000 positions as f32 needs .* free 1.0 MB; try --ctx-size 1953 or"
    ):
        CpuEngine(weights, ctx_size=100_000, kv="f32")
    assert len(weights.layers) == 2  # still whole: the caller may try again
    CpuEngine(weights, ctx_size=1953, kv="f32")


def test_check_memory_says_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    need = memory_needed(config, "bf16", 1000, "f32")
    assert need["total"] == need["weights"] + need["kv"]
    monkeypatch.setattr(memory, "available_memory", lambda: need["total"])
    check_memory(config, "bf16", 1000, "f32")
    monkeypatch.setattr(memory, "available_memory", lambda: need["total"] - 1)
    with pytest.raises(OutOfMemory, match="--ctx-size 999 or --kv int8 or --quant q8"):
        check_memory(config, "bf16", 1000, "f32")
    monkeypatch.setattr(memory, "available_memory", lambda: 10)
    with pytest.raises(OutOfMemory, match="try a smaller model"):
        check_memory(config, "q4", 1000, "int8")
    # only what would help is said
    monkeypatch.setattr(memory, "available_memory", lambda: need["total"])
    with pytest.raises(OutOfMemory, match=r"try --ctx-size \d+$"):
        check_memory(config, "bf16", 100_000, "f32")
    monkeypatch.setattr(memory, "available_memory", lambda: need["weights"] // 2)
    with pytest.raises(OutOfMemory, match=r"try --quant q4 with a smaller --ctx-size$"):
        check_memory(config, "bf16", 100_000, "int8")


def test_memory_of_a_file_that_promises_too_much_is_counted_without_taking_any() -> None:
    layers, experts = 10_000, 1 << 16
    config = moe_config(num_hidden_layers=layers, num_experts=experts)
    tracemalloc.start()
    need = memory_needed(config, "bf16", 16, "int8")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert need["weights"] > layers * experts * 3 * 48 * 64 * 2


@pytest.mark.parametrize(
    ("found", "want"),
    [
        ({"total": 100, "available": 7}, 7),
        ({"total": 100, "available": None}, 50),
        ({"total": None, "available": None}, 4 << 30),
    ],
)
def test_free_memory_that_the_system_does_not_tell_is_guessed(
    found: dict[str, int | None], want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory", lambda: found)
    assert memory.available_memory() == want


def test_without_a_budget_all_or_nothing_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(make_config())
    assert engine_of(weights).stats()["decode_blas"]
    monkeypatch.setattr(engine, "available_memory", lambda: 300_000)
    assert engine_of(weights).stats()["budget_bytes"] == 0


# ---- threads


def test_workers_do_every_item_once() -> None:
    workers = Workers(3)
    seen: list[int] = []
    for n in (0, 1, 2, 100):
        seen.clear()
        workers.run(lambda item, _: seen.append(item), list(range(n)))
        assert sorted(seen) == list(range(n))
    workers.close()


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_no_more_threads_work_than_are_asked_for(most: int) -> None:
    workers = Workers(4)
    seen: set[int] = set()

    def work(_: int, __: Scratch) -> None:
        seen.add(threading.get_ident())
        time.sleep(0.005)

    workers.run(work, list(range(60)), most)
    assert len(seen) == min(most, 4)
    workers.run(work, list(range(60)))
    assert len(seen) == 4
    workers.close()


def test_every_thread_has_a_scratch_of_its_own() -> None:
    workers = Workers(3)
    barrier = threading.Barrier(3, timeout=20)
    scratches: set[int] = set()

    def work(_: int, scratch: Scratch) -> None:
        scratches.add(id(scratch))
        barrier.wait()

    workers.run(work, [0, 1, 2])
    assert len(scratches) == 3
    workers.close()


@pytest.mark.parametrize("by_caller", [True, False])
def test_an_error_in_a_thread_reaches_the_caller(by_caller: bool) -> None:
    workers = Workers(2)
    caller = threading.get_ident()
    both = threading.Barrier(2, timeout=20)

    def work(item: int, _: Scratch) -> None:
        if item < 2:
            both.wait()  # one item each
        if item < 2 and (threading.get_ident() == caller) == by_caller:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        workers.run(work, list(range(20)))
    done: list[int] = []
    workers.run(lambda item, _: done.append(item), list(range(20)))
    assert len(done) == 20
    workers.close()


def test_after_an_interrupt_nobody_writes_any_more() -> None:
    workers = Workers(2)
    caller = threading.get_ident()
    both = threading.Barrier(2, timeout=20)
    finished = threading.Event()

    def work(item: int, _: Scratch) -> None:
        both.wait()
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        time.sleep(0.05)
        finished.set()

    with pytest.raises(KeyboardInterrupt):
        workers.run(work, [0, 1])
    assert finished.is_set()
    workers.close()


def test_threads_end_with_the_engine() -> None:
    def count() -> int:
        return sum(t.name.startswith("pykestrel-cpu") for t in threading.enumerate())

    gc.collect()
    before = count()
    workers = Workers(3)
    workers.run(lambda item, _: None, list(range(10)))
    assert count() == before + 2
    del workers  # without close()
    gc.collect()
    deadline = time.monotonic() + 20
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() == before


def test_scratch_is_kept_and_grows() -> None:
    scratch = Scratch()
    a = scratch.get("a", 4, 8)
    a[...] = 1
    assert np.shares_memory(a, scratch.get("a", 2, 3))
    assert not np.shares_memory(a, scratch.get("b", 2, 3))
    assert scratch.get("a", 100).shape == (100,)
    assert scratch.nbytes == 4 * (100 + 6)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_result_does_not_depend_on_the_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_ALONE", 0)  # even the smallest product is shared
    weights = make_weights(make_config(vocab_size=2000), "q4")
    one = engine_of(weights, cpu_cache=0, threads=1)
    many = engine_of(weights, cpu_cache=0, threads=threads)
    assert many.stats()["threads"] == threads
    for ids in ([1], [2, 3], [4] * 20, [5]):
        np.testing.assert_array_equal(one.forward(ids), many.forward(ids))
