"""What the CPU lays out of a model of which a part is on the device, and when: what it computes, by
many threads, before it is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_cuda import ILLEGAL_ADDRESS, FakeCuda, Kind

from pykestrel.engine.cpu import CpuEngine
from pykestrel.engine.offload import Experts, OffloadEngine
from pykestrel.engine.offload import engine as offload
from pykestrel.engine.offload.device import MIN_FLOP
from pykestrel.errors import OutOfMemory
from pykestrel.meter import LoadMeter

from .conftest import CudaLib
from .test_offload import DENSE, EXPERTS, MIXED, TIED, engine_of, opened, prompt_of, text, whole
from .test_offload_interrupts import close_to, on_the_cpu

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_left: Callable[[], None]) -> Iterator[None]:
    yield
    nothing_left()


@pytest.mark.parametrize("mode", ["segments", "projections"])
@pytest.mark.parametrize("case", [DENSE, TIED, EXPERTS, MIXED])
def test_the_cpu_lays_out_what_it_computes(cuda_lib: CudaLib, case: str, mode: str) -> None:
    """Nothing of what lies on the device, so that all of a model but a matrix loads nearly as fast
    as all of it; under --host-budget everything, as it goes to a file then."""
    prompt = prompt_of(case)
    with opened(case, whole(case) // 2, offload=mode) as model:
        text(model, prompt)
        engine = engine_of(model)
        there = engine.residency.places()
        assert there
        for linear in engine.matrices():
            assert linear.laid_out != (linear.place in there), linear.place
    with opened(case, whole(case) // 2, offload=mode, host_budget=1 << 30) as model:
        assert all(linear.laid_out for linear in engine_of(model).matrices())


@pytest.mark.parametrize("given", [{"min_flop": 1e12}, {"verify": True}])
@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_nothing_is_left_to_lay_out_for_the_first_token(
    cuda_lib: CudaLib, case: str, given: dict[str, Any]
) -> None:
    """Where the CPU computes what is on the device too: below the gate, or to compare."""
    with opened(case, whole(case) - 1, offload="projections", cpu_cache=0, **given) as model:
        engine = engine_of(model)
        before = [linear.laid_out for linear in engine.matrices()]
        engine.forward([5])
        assert [linear.laid_out for linear in engine.matrices()] == before


def test_a_load_that_lays_out_everything_says_how_long_it_took(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out = OffloadEngine.lay_out

    def slow(engine: OffloadEngine) -> None:
        time.sleep(0.2)
        lay_out(engine)

    meter = LoadMeter()
    monkeypatch.setattr(OffloadEngine, "lay_out", slow)
    with opened(DENSE, whole(DENSE) - 1, verify=True, meter=meter) as model:
        assert all(linear.laid_out for linear in engine_of(model).matrices())
    assert meter.wall_s >= 0.2


def test_no_memory_to_measure_the_gate_with(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lays out the matrix that it measures."""
    monkeypatch.setattr(offload, "cpu_seconds", no_room)
    with opened(EXPERTS, whole(EXPERTS) // 2, min_flop=None) as model:
        assert engine_of(model).device.min_flop == MIN_FLOP


# ---- a device that is lost


@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_everything_is_laid_out_at_once(
    fake: FakeCuda, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before float32 copies are made, and not matrix by matrix as the first pass comes to it."""
    ids = prompt_of(case)
    want = on_the_cpu(case, [*ids, 5])
    seen: list[bool] = []
    warm_up = CpuEngine.warm_up

    def looks(cpu: CpuEngine) -> None:
        seen.append(all(linear.laid_out for linear in cpu.matrices()))
        warm_up(cpu)

    with opened(case, whole(case) - 1) as model:
        engine = engine_of(model)
        engine.forward(ids)
        monkeypatch.setattr(CpuEngine, "warm_up", looks)
        fake.fail_at(1, ILLEGAL_ADDRESS, Kind.LAUNCH)
        assert close_to(engine.forward([5]), want)
        assert seen == [True]
    fake.reset()


@pytest.mark.parametrize("error", [OutOfMemory("no room"), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_a_layout_that_fails_then(
    fake: FakeCuda, case: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for all of it the matrices are laid out as they are needed; an interrupted one
    is gone on with."""
    ids = prompt_of(case)
    asked: list[int] = []
    lay_out = CpuEngine.lay_out

    def fails(cpu: CpuEngine, *given: Any) -> None:
        asked.append(1)
        if len(asked) == 1:
            raise error
        lay_out(cpu, *given)

    with opened(case, whole(case) - 1) as model:
        engine = engine_of(model)
        engine.forward(ids)
        monkeypatch.setattr(CpuEngine, "lay_out", fails)
        fake.fail_at(1, ILLEGAL_ADDRESS, Kind.LAUNCH)
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                engine.forward([5])
        assert close_to(engine.forward([5]), on_the_cpu(case, [*ids, 5]))
        assert len(asked) == 1 + interrupted
    fake.reset()


def no_room(*_: Any, **__: Any) -> float:
    raise OutOfMemory("no room")


# ---- an interrupt


def test_no_thread_lays_out_what_goes_up(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl+C leaves one at work, in the memory that experts are uploaded from."""
    order: list[str] = []

    def noted(of: type[Any], name: str) -> None:
        before = getattr(of, name)

        def call(*given: Any) -> Any:
            order.append(name)
            return before(*given)

        monkeypatch.setattr(of, name, call)

    with opened(EXPERTS, whole(EXPERTS) // 2) as model:
        noted(CpuEngine, "settle")
        noted(Experts, "after")
        engine_of(model).forward([5])
    assert order[:2] == ["settle", "after"]
