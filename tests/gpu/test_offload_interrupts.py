"""A model of which a part is on the device, when something comes in between: a failure while it is
loaded, Ctrl+C in a pass, a device that is lost; and what is left when it is closed."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, FakeCuda, Kind

import pykestrel
from pykestrel import Model, native, offloading
from pykestrel.engine.cpu import CpuEngine
from pykestrel.engine.offload import device as device_module
from pykestrel.engine.offload import experts, upload
from pykestrel.errors import CudaUnavailable, NativeError, OutOfMemory
from pykestrel.native import Proj, abi

from .conftest import CudaLib
from .device_models import DATA
from .test_offload import DENSE, EXPERTS, engine_of, opened, prompt_of, text, whole

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_left: Callable[[], None]) -> Iterator[None]:
    yield
    nothing_left()


def on_the_cpu(case: str, ids: list[int]) -> Any:
    """The logits of the last id."""
    with pykestrel.load(DATA / case, device="cpu", quant="q8", kv="f32", ctx_size=64) as model:
        return model.session.prompt(ids)


def close_to(got: Any, want: Any) -> bool:
    return bool(np.abs(got - want).max() <= 5e-3 * np.abs(want).max())


@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_a_device_that_is_lost_while_a_model_is_loaded(fake: FakeCuda, case: str) -> None:
    for n in range(1, 400):
        fake.reset()
        fake.fail_at(n, ILLEGAL_ADDRESS, Kind.LAUNCH)
        try:
            opened(case, whole(case) * 3 // 4).close()
        except CudaUnavailable:
            continue
        assert fake.fault_pending
        break
    else:
        pytest.fail("the load made more launches than were expected")
    fake.reset()


def test_a_gate_that_cannot_be_measured_is_the_default(fake: FakeCuda) -> None:
    with opened(EXPERTS, whole(EXPERTS) // 2, min_flop=None) as model:
        want = engine_of(model).stats()["device_weights"]
    fake.reset()
    for n in range(1, 400):
        fake.reset()
        fake.fail_at(n, OUT_OF_MEMORY, Kind.SYNC)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with opened(EXPERTS, whole(EXPERTS) // 2, min_flop=None) as model:
                stats = engine_of(model).stats()
        if fake.fault_pending:
            pytest.fail("measuring made no call that could fail")
        if "the CPU computes what the GPU does not" in str(said[0].message):
            break
    assert stats["min_flop"] == device_module.MIN_FLOP
    assert stats["device_weights"] == want
    fake.reset()


def test_no_memory_for_an_upload_is_said(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("Unable to allocate 1.00 GiB")

    monkeypatch.setattr(offloading, "upload", full)
    with pytest.raises(
        OutOfMemory, match=r"does not fit in memory \(Unable to allocate 1.00 GiB\)"
    ):
        opened(DENSE, whole(DENSE) // 2)


@pytest.mark.parametrize("mode", ["segments", "projections"])
def test_a_cpu_that_is_left_alone_is_as_fast_as_if_it_always_was(
    fake: FakeCuda, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the float32 copies that a load without a device would have made; where there is no
    memory for them it goes on from the codes."""
    ids = prompt_of(DENSE)
    with pykestrel.load(DATA / DENSE, device="cpu", quant="q8", kv="f32", ctx_size=64) as model:
        alone = model.session.engine.stats()
        want = model.session.engine.forward([*ids, 5])
    for memory in (True, False):
        with opened(DENSE, whole(DENSE) - 1, offload=mode) as model:
            engine = engine_of(model)
            engine.forward(ids)
            assert engine.stats()["expanded_bytes"] < alone["expanded_bytes"]
            if not memory:
                monkeypatch.setattr(CpuEngine, "warm_up", no_room)
            fake.fail_at(1, ILLEGAL_ADDRESS, Kind.LAUNCH)
            assert close_to(engine.forward([5]), want)
            assert engine.fallback
            engine.truncate(len(ids))
            assert close_to(engine.forward([5]), want)
            stats = engine.stats()
        fake.reset()
        if memory:
            assert stats["expanded_bytes"] == alone["expanded_bytes"]
        assert stats["decode_blas"] == (alone["decode_blas"] if memory else False)


def no_room(_: CpuEngine) -> None:
    raise OutOfMemory("no room")


@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_a_weight_that_did_not_get_there_leaves_nothing(fake: FakeCuda, case: str) -> None:
    for n in range(1, 40, 3):
        fake.reset()
        fake.fail_at(n, INVALID_VALUE, Kind.MEMCPY)
        with opened(case, whole(case) * 3 // 4) as model:
            engine = engine_of(model)
            assert engine.handle is not None
            there = native.cache_stats(engine.handle).entries
            assert there == sum(len(part.entries) for part in engine.residency.parts)
            assert engine.stats()["device_weights"] == len(engine.residency.places())
    fake.reset()


@pytest.mark.parametrize("proj", [Proj.ROUTER, Proj.GATE, Proj.UP, Proj.DOWN])
def test_an_interrupt_in_the_upload_of_stacks_leaves_nothing(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch, proj: Proj
) -> None:
    """In the middle of one, behind whole entries."""
    put = native.cache_rows
    keys = {native.wkey(layer, proj) for layer in range(3)}
    seen = []

    def interrupted(handle: Any, key: int, *given: Any) -> None:
        put(handle, key, *given)
        if key in keys:
            seen.append(key)
            if proj == Proj.ROUTER or len(seen) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(native, "cache_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened(EXPERTS, whole(EXPERTS) * 3 // 4)
    assert seen


def refused(model: Model, fake: FakeCuda) -> None:
    """The next launch of the segment is refused once, and Ctrl+C comes while that is dealt with."""
    fake.fail_at(1, INVALID_VALUE, Kind.LAUNCH)
    with pytest.raises(KeyboardInterrupt):
        model.session.extend([7])


@pytest.mark.parametrize("where", ["read_rows", "take_rows"])
@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_an_interrupt_while_the_cpu_takes_the_segment_over(
    fake: FakeCuda, case: str, where: str
) -> None:
    prompt = prompt_of(case)
    with opened(case, whole(case) - 1) as model:
        text(model, prompt, 3)
        seen = list(model.session.seen)

        def interrupt(*_: Any) -> Any:
            raise KeyboardInterrupt

        setattr(engine_of(model).device, where, interrupt)
        refused(model, fake)
        assert engine_of(model).position == len(seen)
        assert close_to(model.session.extend([7]), on_the_cpu(case, [*seen, 7]))


@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_an_interrupt_while_a_lost_sequence_is_computed_anew(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    prompt = prompt_of(case)
    with opened(case, whole(case) - 1) as model:
        text(model, prompt, 3)
        seen = list(model.session.seen)
        engine = engine_of(model)
        cpu = engine._cpu
        forward, calls = cpu.forward, iter(range(10))

        def interrupted(ids: list[int], **given: Any) -> Any:
            if next(calls) == 1:
                raise KeyboardInterrupt
            return forward(ids, **given)

        monkeypatch.setattr(cpu, "forward", interrupted)
        fake.fail_at(1, ILLEGAL_ADDRESS, Kind.LAUNCH)
        with pytest.raises(KeyboardInterrupt):
            model.session.extend([7])
        assert engine.position == len(seen)
        model.session.rewind(len(seen) - 1)
        assert close_to(model.session.extend([7]), on_the_cpu(case, [*seen[:-1], 7]))
        assert engine.stats()["device_bytes"] == 0  # a lost device cannot be asked


def test_an_interrupt_while_experts_are_exchanged(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before the pass that it is raised from: the sequence is as it was."""
    monkeypatch.setattr(experts, "_EVERY", 1)
    with opened(EXPERTS, whole(EXPERTS) * 6 // 10) as model:
        engine = engine_of(model)
        engine.forward([1, 2, 3])

        def interrupt(*_: Any) -> Any:
            raise KeyboardInterrupt

        assert engine.experts is not None
        monkeypatch.setattr(engine.experts, "worth_exchanging", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.forward([4])
        assert engine.position == 3


@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_a_closed_model_holds_no_matrix(cuda_lib: CudaLib, case: str) -> None:
    model = opened(case, whole(case) * 3 // 4, offload="projections")
    text(model, prompt_of(case), 3)
    matrices = [weakref.ref(linear) for linear in engine_of(model).matrices()]
    model.close()
    model.close()
    gc.collect()
    assert not [one for one in matrices if one() is not None]


def test_experts_that_cannot_come_leave_a_place_for_others(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_EVERY", 1)
    with opened(EXPERTS, whole(EXPERTS) // 2, offload="projections") as model:
        engine = engine_of(model)
        moving = engine.experts
        assert moving is not None
        there, full = len(moving._resident), engine.stats()["device_bytes"]
        upload, left = moving._upload, ["down", "gate_up", "down"]

        def interrupted(handle: Any, weight: Any, linear: Any) -> None:
            if left and weight.place.kind.endswith(left[0]):
                del left[0]
                raise KeyboardInterrupt
            upload(handle, weight, linear)

        monkeypatch.setattr(moving, "_upload", interrupted)
        for _ in range(8):
            for expert in moving.picks:
                moving.picks[expert] += 1000 * (expert not in moving._resident)
            try:
                engine.forward([1])
            except KeyboardInterrupt:
                assert len(moving._resident) == there - 1
                assert engine.stats()["device_bytes"] < full
        assert not left
        assert moving.evictions > 0
        assert len(moving._resident) == there
        assert engine.stats()["device_bytes"] == full
        assert engine.handle is not None
        entries = native.cache_stats(engine.handle).entries
        assert entries == engine.stats()["device_weights"]


def test_half_an_expert_that_cannot_come_is_no_longer_asked_for(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory had ended between its two matrices, and the first leaves with what fails."""
    left = [2 * 3 + 1 + 2 * 4 + 1]  # what every token reads, four experts and a half

    def until_memory_ends(handle: Any, weight: Any, linear: Any, *workers: Any) -> None:
        if not left[0]:
            raise NativeError("no room", abi.NOT_DONE)
        left[0] -= 1
        upload(handle, weight, linear, *workers)

    monkeypatch.setattr(offloading, "upload", until_memory_ends)
    with opened(EXPERTS, whole(EXPERTS) - 1, offload="projections") as model:
        engine = engine_of(model)
        moving = engine.experts
        assert moving is not None
        half = engine.residency.weights[-1]
        expert = half.place.layer, half.place.expert
        assert half.place.kind == "expert_gate_up"
        assert expert in moving.outside
        moving.picks[expert] = 1_000_000

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(moving, "_upload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            moving.after(64, engine.device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.forward(list(range(1, 30)))  # all experts
        assert engine.handle is not None
        entries = native.cache_stats(engine.handle).entries
        assert entries == engine.stats()["device_weights"]


def test_the_table_is_printed_of_a_lost_device_too(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYKESTREL_PROF", "1")
    with opened(EXPERTS, whole(EXPERTS) // 2) as model:
        fake.fail_at(9, ILLEGAL_ADDRESS, Kind.LAUNCH)
        text(model, prompt_of(EXPERTS), 3)
        assert model.session.engine.name == "cpu"
    said = capsys.readouterr().err
    assert "PROF qwen3_moe: offload" in said
    assert "refused by the library" in said
