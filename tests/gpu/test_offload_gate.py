"""The gate: what is too small for a round trip stays on the CPU, which is made ready for it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
import pytest

import pykestrel
from pykestrel import native, offloading
from pykestrel.engine.cpu import CpuEngine
from pykestrel.engine.cpu.linear import Place
from pykestrel.engine.cpu.workers import Workers
from pykestrel.engine.offload import UPLOAD_THREADS, choose, weights_of
from pykestrel.engine.offload import engine as offload
from pykestrel.loading import read_config, resolve_model

from .conftest import CudaLib
from .device_models import DATA
from .test_offload import DENSE, EXPERTS, engine_of, opened, prompt_of, text, whole


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_left: Callable[[], None]) -> Iterator[None]:
    yield
    nothing_left()


def copies(**given: Any) -> int:
    """Bytes of float32 copies on the CPU when all but one byte of the weights is on the device."""
    settings = {"offload": "projections", **given}
    with opened(DENSE, whole(DENSE) - 1, **settings) as model:
        return int(engine_of(model).stats()["expanded_bytes"])


def test_what_the_gate_leaves_gets_a_float32_copy(cuda_lib: CudaLib) -> None:
    """As on the CPU alone, where a copy is several times as fast as the codes."""
    none, all_ = copies(min_flop=0), copies(min_flop=1e12)
    with opened(DENSE, whole(DENSE) - 1, offload="projections") as model:
        linears = engine_of(model).matrices()
        there = engine_of(model).residency.weights
    assert none == sum(one.expanded_bytes for one in linears) - sum(
        one.expanded_bytes for one in linears if one.place in {w.place for w in there}
    )
    assert all_ == sum(one.expanded_bytes for one in linears)
    flops = sorted(weight.flop for weight in there)
    some = copies(min_flop=flops[len(flops) // 2])
    assert none < some < all_
    # layers that run as a segment are never asked for single products
    assert copies(min_flop=1e12, offload="segments") < all_


@pytest.mark.parametrize("share", [75, 99.9])
@pytest.mark.parametrize(("case", "cpu_cache"), [(DENSE, None), (DENSE, 0), (EXPERTS, None)])
def test_the_gate_is_measured_the_way_the_cpu_works(
    cuda_lib: CudaLib,
    case: str,
    cpu_cache: int | None,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From float32 copies where the CPU would have them if there were no device, else from the
    codes: so are the experts of a token, most of what it reads."""
    asked: list[bool] = []

    def seconds(*given: Any, expanded: bool = False, **others: Any) -> float:
        asked.append(expanded)
        return 1e-3

    monkeypatch.setattr(offload, "cpu_seconds", seconds)
    given: dict[str, Any] = {"min_flop": None, "cpu_cache": cpu_cache, "offload": "projections"}
    with opened(case, int(whole(case) * share / 100), **given) as model:
        engine = engine_of(model)
        weights = [w for w in engine.residency.weights if w.place.kind != "head"]
        largest = max(weights, key=lambda w: w.flop)
        trip = engine.device.min_flop * 1e-3 / largest.flop
        assert 0 < trip < 1
        text(model, prompt_of(case))
    assert asked == [case == DENSE and cpu_cache is None]


@pytest.mark.parametrize("cpu_cache", [None, 0, 1 << 30])
@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_the_gate_of_a_model_that_is_all_there_is_measured_in_that_way_too(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch, case: str, cpu_cache: int | None
) -> None:
    """All but the embedding: nothing that the CPU is left with says how it would compute what
    the gate leaves it."""
    settings: dict[str, Any] = {"quant": "q8", "kv": "f32", "ctx_size": 64, "cpu_cache": cpu_cache}
    with pykestrel.load(DATA / case, device="cpu", **settings) as model:
        engine = model.session.engine
        assert isinstance(engine, CpuEngine)
        want = engine.expands
    asked: list[bool] = []

    def seconds(*given: Any, expanded: bool = False, **others: Any) -> float:
        asked.append(expanded)
        return 1e-9  # nothing is worth a round trip

    monkeypatch.setattr(offload, "cpu_seconds", seconds)
    given = {"min_flop": None, "cpu_cache": cpu_cache, "offload": "projections"}
    with opened(case, whole(case) - 1, **given) as model:
        stats = engine_of(model).stats()
        assert stats["device_weights"] >= stats["device_wanted"] - 2  # padding
        assert asked == [want] == [stats["decode_blas"]]


@pytest.mark.parametrize("expanded", [False, True])
def test_measuring_the_cpu_leaves_a_matrix_as_it_was(cuda_lib: CudaLib, expanded: bool) -> None:
    with opened(EXPERTS, whole(EXPERTS) // 2) as model:
        linear = engine_of(model).matrices()[0]
        for before in (None, np.zeros((linear.k, linear.n), np.float32)):
            linear.expanded = before
            assert offload.cpu_seconds(linear, 2, 3, expanded=expanded) > 0
            assert linear.expanded is before


def test_experts_in_stacks_are_computed_by_the_segment_whatever_the_gate_is(
    cuda_lib: CudaLib,
) -> None:
    config = read_config(resolve_model(DATA / EXPERTS))
    weights = weights_of(config, "q8")
    all_ = choose(config, weights, 1 << 40, native.cache_size)
    assert all_.stacks
    assert all_.worth(1e30) == all_.places() - {weights[-1].place}  # the head is no layer's
    single = choose(config, weights, 1 << 40, native.cache_size, mode="projections")
    assert single.worth(1e30) == frozenset()
    assert single.worth(0) == single.places() == all_.places()


def test_the_experts_of_a_token_are_weighed_together(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate that one of them is below and all are not: the GPU computes them, so the CPU weighs
    what it computes from float32 copies without them."""
    left: list[Container[Place]] = []
    leave = CpuEngine.leave

    def seen(cpu: CpuEngine, elsewhere: Container[Place]) -> None:
        left.append(elsewhere)
        leave(cpu, elsewhere)

    monkeypatch.setattr(CpuEngine, "leave", seen)
    with opened(EXPERTS, whole(EXPERTS) - 1, offload="projections") as model:
        weights = engine_of(model).residency.weights
        experts = [w for w in weights if w.place.kind == "expert_gate_up"]
        together = model.config.num_experts_per_tok
    for gate, device in ((experts[0].flop + 1, True), (experts[0].flop * together + 1, False)):
        with opened(EXPERTS, whole(EXPERTS) - 1, offload="projections", min_flop=gate) as model:
            engine = engine_of(model)
            engine.forward([5])
            laid_out = {one.place for one in engine.matrices() if one.laid_out}
            assert all((w.place in laid_out) != device for w in experts)
            assert all((w.place in left[-1]) == device for w in experts)


def test_a_part_goes_up_by_no_more_threads_than_are_allowed(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    class Counted(Workers):
        def __init__(self, count: int | None = None) -> None:
            asked.append(count)
            super().__init__(count)

    monkeypatch.setattr(offloading, "Workers", Counted)
    for threads in (1, 3, 99):
        opened(DENSE, whole(DENSE) // 2, threads=threads).close()
    assert asked == [1, 3, UPLOAD_THREADS]


@pytest.mark.parametrize("prefill", ["cpu", "cuda"])
def test_prefill_of_a_part_is_said_to_have_no_effect(cuda_lib: CudaLib, prefill: str) -> None:
    with pytest.warns(UserWarning, match=f"--prefill {prefill} is of a model that is on the GPU"):
        opened(DENSE, whole(DENSE) // 2, prefill=prefill).close()
