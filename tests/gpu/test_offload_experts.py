"""Experts of a model of which a part is on the device: in stacks, as a segment has them, or each on
its own, where they move as the router picks them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import ILLEGAL_ADDRESS, INVALID_VALUE, FakeCuda, Kind

import pykestrel
from pykestrel import Model, native
from pykestrel.engine.cuda import CudaEngine, entries
from pykestrel.engine.offload import Experts, OffloadEngine, experts, upload
from pykestrel.errors import NativeError
from pykestrel.native import abi

from .conftest import CudaLib
from .device_models import DATA
from .test_offload import EXPERTS, MIXED, engine_of, opened, prompt_of, text, whole


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_left: Callable[[], None]) -> Iterator[None]:
    yield
    nothing_left()


def experts_of(model: Model) -> tuple[OffloadEngine, Experts, native.Handle]:
    engine = engine_of(model)
    assert engine.experts is not None
    assert engine.handle is not None
    return engine, engine.experts, engine.handle


def the_cpu() -> Model:
    return pykestrel.load(DATA / EXPERTS, device="cpu", quant="q8", kv="f32", ctx_size=64)


def cpu_text() -> list[int]:
    with the_cpu() as model:
        return text(model, prompt_of(EXPERTS))


def cpu_logits(tokens: list[int]) -> Any:
    """After each."""
    with the_cpu() as model:
        return model.logits(tokens)


# ---- products


def test_fused_and_unfused_are_the_same_bits(cuda_lib: CudaLib) -> None:
    """What a token's experts give in one call is what each gives alone."""
    with opened(EXPERTS, whole(EXPERTS) - 1, offload="projections") as model:
        engine, _, handle = experts_of(model)
        weights = engine.residency.weights
        some = [w for w in weights if w.place.kind == "expert_gate_up"][:3]
        n, k = some[0].matrix.rows, some[0].matrix.k
        x = np.random.default_rng(0).standard_normal((1, k), np.float32)
        together, alone = np.empty((3, n), np.float32), np.empty((3, n), np.float32)

        def product(weight: Any, row: int) -> native.Product:
            return native.Product(key=weight.key, index=-1, rows=1, y=row * n, stride=n)

        products = [product(weight, i) for i, weight in enumerate(some)]
        native.dev_gemm_fused(handle, native.Products(products), x, together)
        for one in products:
            native.dev_gemm_fused(handle, native.Products([one]), x, alone)
        assert together.tobytes() == alone.tobytes()


@pytest.mark.parametrize("tokens", [1, 5])
def test_experts_that_are_there_take_one_call(cuda_lib: CudaLib, tokens: int) -> None:
    with opened(EXPERTS, whole(EXPERTS) - 1, offload="projections") as model:
        engine, _, handle = experts_of(model)
        before = native.prof_read(handle)
        engine.forward(list(range(1, tokens + 1)))
        after = native.prof_read(handle)
        layers = model.config.num_hidden_layers
        # qkv, o, gate and up of all experts, their down; the head
        assert after.h2d_copies - before.h2d_copies == 4 * layers + 1


# ---- stacks


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("case", [EXPERTS, MIXED])
def test_the_stacks_are_those_of_the_whole_model(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch, case: str, quant: str
) -> None:
    """The same bytes, routers included, from pieces of a few rows."""
    monkeypatch.setattr("pykestrel.engine.offload.uploads._PIECE", 7 * 64)
    with (
        opened(case, whole(case, quant) - 1, quant=quant) as part,
        opened(case, whole(case, quant), quant=quant) as model,
    ):
        engine = model.session.engine
        assert isinstance(engine, CudaEngine)
        assert engine.handle is not None
        _, _, handle = experts_of(part)
        of_layers = [e for e in entries(model.config, quant) if e.layer != native.HEAD_LAYER]
        assert len(of_layers) == sum(6 if moe else 4 for moe in model.config.layer_is_moe)
        for entry in of_layers:
            assert native.cache_find(handle, entry.key) == entry.matrix
            got = native.cache_read(handle, entry.key, 0, entry.matrix.rows)
            want = native.cache_read(engine.handle, entry.key, 0, entry.matrix.rows)
            for one, other in zip(got, want, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert one.tobytes() == other.tobytes()


def test_experts_in_stacks_stay(cuda_lib: CudaLib) -> None:
    """Whatever the router would pick: the segment needs all of them."""
    tokens = prompt_of(EXPERTS)
    with opened(EXPERTS, whole(EXPERTS) * 60 // 100) as model:
        engine, moving, handle = experts_of(model)
        single, stacked = moving.resident, moving.stacked
        assert single
        assert {layer for layer, _ in stacked} == {2} == set(engine.device.segment)
        assert not (single | moving.outside) & stacked
        held = native.cache_stats(handle).entries
        for expert in stacked:
            moving.picks[expert] = 1_000_000
        moving.after(64, engine.device)
        assert moving.evictions == 0
        coming = sorted(moving.outside)[0]
        moving.picks[coming] = 1000
        moving.after(64, engine.device)
        assert coming in moving.resident
        assert (moving.evictions, moving.stacked) == (1, stacked)
        assert native.cache_stats(handle).entries == held
        got = [engine.forward([token]) for token in tokens]
        assert engine.stats()["segment_layers"] == 1
    np.testing.assert_allclose(got, cpu_logits(tokens), atol=2e-2)  # of a standard deviation of 8


def test_experts_of_a_refused_segment_come_one_by_one(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reads its stacks any more: they make room."""
    monkeypatch.setattr(experts, "_EVERY", 1)
    budget = whole(EXPERTS) - 1
    prompt, want = prompt_of(EXPERTS), cpu_text()
    with opened(EXPERTS, budget) as model:
        engine, moving, handle = experts_of(model)
        everything = engine.stats()["device_weights"]
        assert everything == engine.residency.count
        assert not moving.resident
        text(model, prompt, 3)
        fake.fail_at(1, INVALID_VALUE, Kind.LAUNCH)
        with pytest.warns(UserWarning, match="layers 0 to 2 run on the CPU from here on"):
            assert text(model, prompt) == want
        assert engine.stats()["segment_layers"] == 0
        assert not moving.stacked
        assert set(moving.picks) >= moving.resident > frozenset()
        for expert in moving.outside:
            moving.picks[expert] += 1
        for _ in range(2):
            moving.after(1, engine.device)
        stats = engine.stats()
        assert len(moving.outside) <= 1  # padding
        assert stats["evictions"] == 0
        assert stats["device_weights"] == everything - 2 * len(moving.outside)
        assert stats["device_weights"] == native.cache_stats(handle).entries
        assert stats["device_bytes"] <= budget
        before = native.prof_read(handle).h2d_copies
        engine.forward([1])
        assert native.prof_read(handle).h2d_copies - before == 4 * 3 + 1
        assert text(model, prompt) == want


def refuse(*_: Any) -> None:
    raise NativeError("not today", abi.NOT_DONE)


def test_no_product_finds_an_expert_in_stacks(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the segment is refused: q, k, v and o are tried, experts are not."""
    monkeypatch.setenv("PYKESTREL_PROF", "1")
    monkeypatch.setattr(native, "dev_layers_run", refuse)
    with pytest.warns(UserWarning, match="run on the CPU from here on") as said:
        model = opened(EXPERTS, whole(EXPERTS) - 1)
    with model:
        engine_of(model).forward([1])
    assert len(said) == 1
    lines = capsys.readouterr().err.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("  ")}
    for kind in ("qkv", "o"):
        assert rows[kind].split()[1:3] == ["3/3", "3"]
    for kind in ("expert_gate_up", "expert_down"):
        assert rows[kind].split()[1:3] == ["24/24", "0"]
        assert rows[kind].endswith("not on the device (--vram-budget)")


@pytest.mark.parametrize("percent", [50, 75, 90])
def test_what_comes_in_place_of_stacks_stays_in_the_budget(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch, percent: int
) -> None:
    with opened(EXPERTS, whole(EXPERTS) * percent // 100) as model:
        engine, moving, _ = experts_of(model)
        before = engine.stats()["device_bytes"]
        stacked, single = moving.stacked, moving.resident
        assert stacked
        monkeypatch.setattr(native, "dev_layers_run", refuse)
        with pytest.warns(UserWarning, match="run on the CPU from here on.*: not today"):
            engine.forward([1])
        for expert in stacked | moving.outside:
            moving.picks[expert] = 1
        for _ in range(3):
            moving.after(64, engine.device)
            assert engine.stats()["device_bytes"] <= before
        assert single <= moving.resident
        assert len(moving.resident) >= len(single) + len(stacked) - 1  # padding, a router


def test_a_device_that_is_lost_while_experts_are_exchanged(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The K/V of the segment goes with it, before the pass has begun."""
    tokens = prompt_of(EXPERTS)
    want = cpu_logits(tokens)
    monkeypatch.setattr(experts, "_EVERY", 1)
    with opened(EXPERTS, whole(EXPERTS) * 60 // 100) as model:
        engine, moving, _ = experts_of(model)
        assert engine.device.segment
        for token in tokens[:-1]:
            engine.forward([token])
        moving.picks[sorted(moving.outside)[0]] = 1000

        def lost(*given: Any) -> None:
            fake.fail_at(1, ILLEGAL_ADDRESS, Kind.MEMCPY)
            upload(*given)

        monkeypatch.setattr(moving, "_upload", lost)
        with pytest.warns(UserWarning, match="running on the CPU from here on"):
            got = engine.forward(tokens[-1:])
        assert (engine.name, engine.position) == ("cpu", len(tokens))
    np.testing.assert_allclose(got, want[-1], atol=2e-2)


def test_no_room_for_the_k_v_of_layers_with_experts(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said what that costs and what helps; the experts come as they are picked."""
    prompt, want = prompt_of(EXPERTS), cpu_text()
    init = native.dev_decode_init

    def crowded(handle: native.Handle, config: native.DecodeConfig) -> None:
        fake.set_memory(fake.memory_used + native.decode_size(config) // 2)
        try:
            init(handle, config)
        finally:
            fake.reset()

    monkeypatch.setattr(native, "dev_decode_init", crowded)
    monkeypatch.setattr(experts, "_EVERY", 1)
    budget = whole(EXPERTS) - 1
    with pytest.warns(UserWarning, match="layers 0 to 2") as said:
        model = opened(EXPERTS, budget)
    (words,) = (str(one.message) for one in said)
    assert "their experts are computed on the CPU until the router's picks bring them" in words
    assert "--offload projections has" in words
    assert "a smaller --ctx-size than 64 leaves more room" in words
    assert re.search(r"needs .* GB of device memory", words)
    with model:
        engine, moving, handle = experts_of(model)
        stats = engine.stats()
        # qkv and o, and the head
        assert (stats["segment_layers"], stats["device_weights"]) == (0, 2 * 3 + 1)
        assert native.cache_stats(handle).entries == 2 * 3 + 1
        assert model.loaded.resident is not None
        assert model.loaded.resident.entries == 2 * 3 + 1
        assert "as a whole" not in model.engine.why
        assert text(model, prompt) == want
        assert moving.resident
        assert text(model, prompt) == want
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(EXPERTS, budget, offload="projections").close()


# ---- experts that move


@pytest.mark.parametrize("mode", ["segments", "projections"])
def test_experts_that_the_router_picks_come_to_the_device(cuda_lib: CudaLib, mode: str) -> None:
    """Their picks grow; those that were there and are not picked leave, and the logits stay."""
    tokens = prompt_of(EXPERTS)
    want = cpu_logits(tokens)
    with opened(EXPERTS, whole(EXPERTS) * 60 // 100, offload=mode) as model:
        engine, moving, _ = experts_of(model)
        inside, outside = moving.resident, moving.outside
        assert inside
        assert outside
        hot = sorted(outside)[0]
        moving.picks[hot] = 10_000
        moving.after(64, engine.device)
        assert hot in moving.resident
        assert len(moving.resident) == len(inside)
        assert moving.evictions == 1
        got = [engine.forward([token]) for token in tokens]
        np.testing.assert_allclose(got, want, atol=2e-2)  # of a standard deviation of 8
        moving.after(64, engine.device)
        assert moving.evictions == 1  # nothing is worth it any more


def test_experts_that_keep_taking_turns_are_said_once(cuda_lib: CudaLib) -> None:
    with opened(EXPERTS, whole(EXPERTS) * 60 // 100, offload="projections") as model:
        engine, moving, _ = experts_of(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for turn in range(1, 9):
                for expert in moving.outside:
                    moving.picks[expert] = 100 * 4**turn
                moving.after(64, engine.device)
        words = [str(one.message) for one in said]
        assert len(words) == 1, words
        assert "a token): --vram-budget is too small for this text" in words[0]


def test_a_new_text_is_not_held_to_the_picks_of_an_old_one(cuda_lib: CudaLib) -> None:
    """An expert that was picked 4,000 times, and then no more, leaves before another has been
    picked as often."""
    with opened(EXPERTS, whole(EXPERTS) * 60 // 100, offload="projections") as model:
        engine, moving, _ = experts_of(model)
        old, new = sorted(moving.resident)[0], sorted(moving.outside)[0]
        for expert in moving.resident:
            moving.picks[expert] = 1_000_000
        moving.picks[old] = 4_000
        looks = 0
        while new not in moving.resident:
            moving.picks[new] += 20
            moving.after(64, engine.device)
            looks += 1
            assert looks < 200
        assert old not in moving.resident
        assert 20 * looks < 4_000
