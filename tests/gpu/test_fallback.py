"""What happens when the library says no, or the device is lost: the text goes on."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from cpu_models import make_config, make_weights
from fake_cuda import ILLEGAL_ADDRESS, OUT_OF_MEMORY, FakeCuda, Kind

import pykestrel
from pykestrel import native
from pykestrel.engine import Want
from pykestrel.engine.cpu import CpuEngine
from pykestrel.errors import CudaUnavailable, KestrelError, NativeError, OutOfMemory

from .device_models import DATA, cpu_engine, cuda_engine, put_weights, relative

pytestmark = pytest.mark.usefixtures("nothing_left")

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "reuse": False}
MODEL = DATA / "llama-gqa3"


def strike(fake: FakeCuda, lost: bool) -> None:
    """The next launch does not work, or the one after it loses the device."""
    if lost:
        fake.fail_async(2, ILLEGAL_ADDRESS)
    else:
        fake.fail_at(1, kind=Kind.LAUNCH)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}])
def test_the_text_does_not_change(
    fake: FakeCuda, kv: str, lost: bool, settings: dict[str, Any]
) -> None:
    run = {**GREEDY, **settings}
    with pykestrel.load(MODEL, device="cuda", quant="bf16", kv=kv) as model:
        undisturbed = model.generate([5, 6, 7], max_tokens=8, **run)
        stream = model.stream([5, 6, 7], max_tokens=8, **run)
        tokens = [next(stream).token for _ in range(3)]
        strike(fake, lost)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokens += [chunk.token for chunk in stream]
            again = model.generate([5, 6, 7], max_tokens=8, **run)
        assert tokens == undisturbed.tokens == again.tokens
        (warning,) = caught
        how = "computing the text so far again" if lost else "going on from the same K/V"
        assert f"running on the CPU from here on ({how}): vcuda_" in str(warning.message)
        assert model.engine.name == "cpu"
        assert "the GPU was given up: vcuda_dev_decode_run: " in model.engine.why
        assert fake.memory_used == 0  # given back at once


@pytest.mark.parametrize("lost", [False, True])
def test_a_prompt_that_fails_in_the_middle(fake: FakeCuda, lost: bool) -> None:
    weights = make_weights(make_config(), "q8", seed=1)
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 80, 10)]
    engine, other = cuda_engine(weights), cpu_engine(weights)
    try:
        engine.forward(ids[:4])
        other.forward(ids[:4])
        strike(fake, lost)
        with pytest.warns(UserWarning, match="running on the CPU from here on"):
            got = engine.forward(ids[4:], all_logits=True)
        assert relative(got, other.forward(ids[4:], all_logits=True)) < 3e-2
        assert engine.position == 10
        engine.truncate(6)
        other.truncate(6)
        assert engine.position == 6
        step = engine.step([1], Want(80))
        assert isinstance(step, np.ndarray)
        assert relative(step, other.forward([1])) < 3e-2
        assert np.array_equal(engine.last_logits(), step)
    finally:
        engine.close()


def test_logits_that_cannot_be_fetched(fake: FakeCuda) -> None:
    weights = make_weights(make_config(), "bf16", seed=1)
    engine, other = cuda_engine(weights, kv="f16"), cpu_engine(weights, kv="f16")
    try:
        engine.step([5, 6, 7], Want(80))
        fake.fail_at(1, kind=Kind.MEMCPY)
        with pytest.warns(UserWarning, match="running on the CPU from here on"):
            got = engine.last_logits()
        assert relative(got, other.forward([5, 6, 7])) < 1e-3
        assert engine.position == 3
    finally:
        engine.close()


def test_a_missing_weight_is_a_reason_too(fake: FakeCuda) -> None:
    weights = make_weights(make_config(), "bf16", seed=1)
    engine = cuda_engine(weights, kv="f16")
    try:
        before = engine.forward([5, 6])
        engine.truncate(1)
        assert engine.handle is not None
        native.cache_drop(engine.handle, native.wkey(1, native.Proj.O))
        with pytest.warns(UserWarning, match="layer 1 is not in the cache"):
            after = engine.forward([6])
        assert relative(after, before) < 1e-3
        assert engine.name == "cpu"
    finally:
        engine.close()


def test_without_a_way_back_the_error_is_raised(fake: FakeCuda) -> None:
    from pykestrel.engine.cuda import CudaEngine

    weights = make_weights(make_config(), "bf16", seed=1)
    handle = native.create(0)
    small = put_weights(handle, weights)
    engine = CudaEngine(handle, weights.config, small, quant="bf16", ctx_size=16)
    try:
        engine.forward([5])
        fake.fail_at(1, kind=Kind.LAUNCH)
        with pytest.raises(NativeError) as caught:
            engine.forward([6])
        assert caught.value.status == -1
        assert engine.position == 1
        engine.forward([6])
    finally:
        engine.close()


def test_loading_that_fails_is_the_cpu_with_a_warning_or_refused(fake: FakeCuda) -> None:
    for n in (1, 5, 20):
        fake.reset()
        fake.fail_at(n, OUT_OF_MEMORY, Kind.MALLOC)
        with pytest.warns(UserWarning, match="running on the CPU: vcuda_"):
            model = pykestrel.load(MODEL, quant="q4")
        assert model.engine.name == "cpu"
        model.close()
        assert fake.memory_used == 0
        fake.reset()
        fake.fail_at(n, OUT_OF_MEMORY, Kind.MALLOC)
        with pytest.raises(CudaUnavailable, match="CUDA was asked for and cannot be used"):
            pykestrel.load(MODEL, device="cuda", quant="q4")
        assert fake.memory_used == 0


def test_a_device_that_fails_in_the_quantiser_is_no_fault_of_the_files(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = native.cache_end

    def fail(handle: native.Handle, key: int) -> None:
        if key == native.wkey(1, native.Proj.FUSED_QKV):
            fake.fail_at(1)
        end(handle, key)

    monkeypatch.setattr(native, "cache_end", fail)
    monkeypatch.setattr("pykestrel.loading.load._WORKERS", 1)
    with pytest.warns(UserWarning, match="running on the CPU: vcuda_cache_end: cudaError"):
        model = pykestrel.load(MODEL, quant="q8")
    assert model.engine.name == "cpu"
    model.close()


def test_a_lost_device_whose_counters_were_to_be_printed(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYKESTREL_PROF", "1")
    weights = make_weights(make_config(), "q8", seed=1)
    engine, other = cuda_engine(weights, kv="f16"), cpu_engine(weights, kv="f16")
    try:
        engine.forward([5, 6])
        strike(fake, lost=True)
        with pytest.warns(UserWarning, match="computing the text so far again"):
            got = engine.forward([7])
        assert relative(got, other.forward([5, 6, 7])) < 1e-3
        assert "PROF qwen3: the counters cannot be read: " in capsys.readouterr().err
    finally:
        engine.close()


def test_a_long_prompt_that_cannot_go_on_changes_nothing(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykestrel.engine.cuda.plan.PREFILL_ROWS", 2)
    weights = make_weights(make_config(), "q8", seed=1)
    engine = cuda_engine(weights, kv="f16")
    engine._make_cpu = None
    try:
        engine.forward([5])
        run = native.dev_prefill

        def fail(*args: Any, **more: Any) -> None:
            if args[2] == 5:  # the third part
                fake.fail_at(1, kind=Kind.MEMCPY)
            run(*args, **more)

        monkeypatch.setattr(native, "dev_prefill", fail)
        with pytest.raises(NativeError):
            engine.forward([6, 7, 8, 9, 10, 11])
        monkeypatch.undo()
        assert engine.position == 1
        assert engine.handle is not None
        assert native.kv_position(engine.handle) == 1
        assert engine.forward([6]).shape == (80,)
    finally:
        engine.close()


def test_a_cpu_that_cannot_take_over_is_said_beside_the_reason(fake: FakeCuda) -> None:
    def make_cpu() -> CpuEngine:
        raise OutOfMemory("the weights need 30 GB and 8 GB are free; take q4")

    engine = cuda_engine(make_weights(make_config(), "q8", seed=1), kv="f16")
    engine._make_cpu = make_cpu
    try:
        engine.forward([5])
        before = engine.forward([6])
        engine.truncate(1)
        strike(fake, lost=False)
        with (
            pytest.warns(UserWarning, match="running on the CPU from here on"),  # before the work
            pytest.raises(KestrelError, match=r"^vcuda_.*, and the CPU cannot go on: the weights"),
        ):
            engine.forward([6])
        assert engine.position == 1
        assert np.array_equal(engine.forward([6]), before)
        assert engine.fallback is None
    finally:
        engine.close()


def test_a_model_that_is_dropped_gives_the_device_back(fake: FakeCuda) -> None:
    model = pykestrel.load(MODEL, device="cuda", quant="q8", ctx_size=32)
    stream = model.stream([5, 6, 7], max_tokens=3)
    next(stream)
    del model
    assert fake.memory_used > 0
    del stream
    assert fake.live == 0


def test_a_model_that_has_no_room(fake: FakeCuda) -> None:
    fake.set_memory(256 << 20)  # what is left to CUDA itself
    with pytest.raises(CudaUnavailable) as caught:
        pykestrel.load(MODEL, device="cuda", quant="bf16", ctx_size=512, kv="f16")
    words = str(caught.value)
    assert "this model needs 0.28 GB on Fake GPU 0" in words
    assert "weights as bf16" in words
    assert ", CUDA itself 0.27 GB), free 0.27 GB" in words
    assert "; try " in words
    with pytest.warns(UserWarning, match=r"running on the CPU: this model needs"):
        model = pykestrel.load(MODEL, quant="bf16", ctx_size=512, kv="f16")
    assert "this model needs" in model.engine.why
    model.close()


@pytest.mark.parametrize(
    ("driver", "devices", "hidden", "words"),
    [
        (0, 0, False, None),
        (13010, 0, True, None),
        (13010, 0, False, "shows no GPU"),
        (12000, 1, False, "update the driver"),
    ],
)
def test_a_driver_without_a_gpu_is_worth_a_warning(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch,
    driver: int, devices: int, hidden: bool, words: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr("pykestrel.device._warned", False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake.driver(driver)
    fake.devices(devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pykestrel.load(MODEL, quant="q8").close()
    said = [str(warning.message) for warning in caught]
    assert len(said) == (words is not None)
    assert all(words in text for text in said if words is not None)
