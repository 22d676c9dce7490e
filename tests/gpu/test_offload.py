"""A model of which a part is on the device: the same text whatever fits, and what happens when the
device says no."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import ILLEGAL_ADDRESS, INVALID_VALUE, FakeCuda, Kind

import pykestrel
from pykestrel import Model, native
from pykestrel.engine.cuda import device_need
from pykestrel.engine.offload import OffloadEngine
from pykestrel.loading import read_config, resolve_model

from .conftest import CudaLib
from .device_models import DATA, golden

DENSE, TIED = "qwen3-untied", "qwen3-tied"
EXPERTS, MIXED = "qwen3-moe", "qwen3-moe-mixed"
TOKENS = 6


def whole(case: str, quant: str = "q8") -> int:
    """Device bytes of all weights."""
    config = read_config(resolve_model(DATA / case))
    return device_need(config, quant, 64, "f32").weights


def opened(case: str, budget: int, **given: Any) -> Model:
    settings = {"quant": "q8", "kv": "f32", "ctx_size": 64, "min_flop": 0, **given}
    return pykestrel.load(DATA / case, device="cuda", vram_budget=budget, **settings)


def prompt_of(case: str) -> list[int]:
    return golden(case)[0][:6]


def text(model: Model, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    made = model.generate(prompt, temperature=0, max_tokens=tokens, ignore_eos=True)
    return made.tokens


def engine_of(model: Model) -> OffloadEngine:
    engine = model.session.engine
    assert isinstance(engine, OffloadEngine)
    return engine


@pytest.fixture
def cpu_text() -> Callable[..., list[int]]:
    def run(case: str, quant: str = "q8") -> list[int]:
        prompt = prompt_of(case)
        with pykestrel.load(DATA / case, device="cpu", quant=quant, kv="f32", ctx_size=64) as model:
            return text(model, prompt)

    return run


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_left: Callable[[], None]) -> Iterator[None]:
    yield
    nothing_left()


@pytest.mark.parametrize("mode", ["segments", "projections"])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("case", [DENSE, EXPERTS, MIXED])
def test_the_text_does_not_depend_on_what_fits(
    cuda_lib: CudaLib, cpu_text: Callable[..., list[int]], case: str, quant: str, mode: str
) -> None:
    prompt = prompt_of(case)
    want = cpu_text(case, quant)
    there = []
    for percent in (0, 40, 75, 99):
        budget = whole(case, quant) * percent // 100
        with opened(case, budget, quant=quant, offload=mode) as model:
            assert model.engine.name == "offload"
            assert text(model, prompt) == want, percent
            stats = engine_of(model).stats()
            assert stats["device_bytes"] <= budget
            there.append(stats["device_weights"])
            layers = stats["segment_layers"]
    assert layers == (model.config.num_hidden_layers if mode == "segments" else 0)
    assert there == sorted(there)
    assert there[0] == 0
    assert there[-1] > 0
    with opened(case, whole(case, quant), quant=quant) as model:
        assert model.engine.name == "cuda"


@pytest.mark.parametrize("case", [DENSE, EXPERTS, MIXED])
def test_whole_layers_run_as_one_segment(cuda_lib: CudaLib, case: str) -> None:
    prompt = prompt_of(case)
    with opened(case, whole(case) - 1) as model:
        engine = engine_of(model)
        assert len(engine.device.segment) == model.config.num_hidden_layers
        assert engine.handle is not None
        text(model, prompt, 4)
        native.prof_reset(engine.handle)
        engine.forward([5])
        seen = native.prof_read(engine.handle)
    # one call for the layers and one for the head
    assert (seen.h2d_copies, seen.d2h_copies) == (2, 2)


@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_a_prompt_goes_through_the_segment_at_once_and_is_reused(
    cuda_lib: CudaLib, cpu_text: Callable[..., list[int]], case: str
) -> None:
    a = prompt_of(case)
    b = a[:3] + [9, 8, 7]
    with opened(case, whole(case) * 3 // 4) as model:
        assert engine_of(model).device.segment
        first, other, again = (text(model, ids) for ids in (a, b, a))
    assert first == again == cpu_text(case)
    with opened(case, whole(case) * 3 // 4) as model:
        assert text(model, b) == other


@pytest.mark.parametrize("case", [DENSE, EXPERTS])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_every_product_of_the_device_is_verified(cuda_lib: CudaLib, case: str, quant: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(case, whole(case, quant) * 3 // 4, quant=quant, verify=True) as model:
            text(model, prompt_of(case))
            stats = engine_of(model).stats()
    assert stats["verified"] > 40
    assert stats["verify_failures"] == 0


@pytest.mark.parametrize("case", [DENSE, EXPERTS, MIXED])
def test_verification_leaves_no_product_out(cuda_lib: CudaLib, case: str) -> None:
    """Layers do not run as a segment then, and experts are not in stacks."""
    with opened(case, whole(case) - 1, verify=True) as model:
        engine = engine_of(model)
        engine.forward([1, 2, 3])
        before = engine.stats()["verified"]
        engine.forward([4])
        stats = engine.stats()
    c = model.config
    of_layers = sum(2 + 2 * (c.num_experts_per_tok if moe else 1) for moe in c.layer_is_moe)
    assert stats["verified"] - before == of_layers + 1
    assert (stats["verify_failures"], stats["segment_layers"]) == (0, 0)


def test_verification_finds_a_wrong_weight(cuda_lib: CudaLib) -> None:
    with opened(DENSE, whole(DENSE) - 1, verify=True) as model:
        engine = engine_of(model)
        weight = next(w for w in engine.residency.weights if w.place.kind == "down")
        assert engine.handle is not None
        native.cache_fill(engine.handle, weight.key, weight.matrix, seed=1)
        with pytest.warns(UserWarning, match=f"the GPU and the CPU differ in {weight.place}, row"):
            engine.forward([1, 2, 3])
        engine.forward([4])
        assert engine.stats()["verify_failures"] == 2
        assert engine.stats()["verified"] > 2


def test_the_gate_keeps_small_products_on_the_cpu(cuda_lib: CudaLib) -> None:
    budget = whole(DENSE) - 1
    with opened(DENSE, budget, min_flop=1e12, offload="projections") as model:
        engine = engine_of(model)
        assert engine.handle is not None
        before = native.prof_read(engine.handle).h2d_copies
        engine.forward([1, 2, 3])
        assert native.prof_read(engine.handle).h2d_copies == before
    with opened(DENSE, budget, min_flop=None) as model:
        assert engine_of(model).device.min_flop > 0  # measured


def test_the_table_has_a_row_for_every_projection_and_the_reason(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYKESTREL_PROF", "1")
    for case, mode, share in (
        (EXPERTS, "projections", 50),
        (EXPERTS, "segments", 80),
        (DENSE, "segments", 60),
    ):
        with opened(case, whole(case) * share // 100, offload=mode, min_flop=20_000) as model:
            text(model, prompt_of(case))
            engine = engine_of(model)
            wanted = Counter(linear.place.kind for linear in engine.matrices())
            there = Counter(place.kind for place in engine.residency.places())
        lines = capsys.readouterr().err.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("PROF "))
        assert lines[start].endswith(": offload, microseconds of a call and their share")
        assert "cache_probe" in lines[start + 1]
        assert "d2h_sync" in lines[start + 1]
        rows = {line.split()[0]: line for line in lines[start + 2 :] if line.strip()}
        kinds = {"qkv", "o", "head"}
        kinds |= {"expert_gate_up", "expert_down"} if case == EXPERTS else {"gate_up", "down"}
        assert kinds == set(wanted)
        for kind in kinds:
            assert rows[kind].split()[1] == f"{there[kind]}/{wanted[kind]}"
        assert "always on the CPU" in rows["embedding"]
        assert ("router" in rows) == (case == EXPERTS)
        if case == EXPERTS:
            routers = 2 if mode == "segments" else 0
            assert rows["router"].split()[1] == f"{routers}/3"
        assert any("not on the device (--vram-budget)" in row for row in rows.values())
        if mode == "projections":
            assert "below --min-flop" in rows["o"]
        else:
            # one call a pass: the prompt, and each token but the last
            assert f"as one segment: {TOKENS} calls" in rows["layers"]


def test_many_results_come_in_several_calls(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits of a long prompt would be hundreds of MB in one."""
    tokens = list(range(1, 18))
    with opened(DENSE, whole(DENSE) - 1, offload="projections") as model:
        engine = engine_of(model)
        assert engine.handle is not None
        want = engine.forward(tokens, all_logits=True)
        engine.truncate(0)
        before = native.prof_read(engine.handle).d2h_copies
        vocab = model.config.vocab_size
        monkeypatch.setattr("pykestrel.engine.offload.device._MOST_RESULTS", 6 * vocab)
        got = engine.forward(tokens, all_logits=True)
        calls = native.prof_read(engine.handle).d2h_copies - before
    np.testing.assert_allclose(got, want, atol=5e-2)  # a last part of few rows is more exact
    assert calls > len(engine.residency.weights) + 2  # the head in three


# ---- what does not fit


@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_one_byte_too_few_is_said_with_the_flag_and_the_value(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    from pykestrel.cli.main import main

    need = whole(case)
    ids = ",".join(map(str, prompt_of(case)))
    arguments = ["run", "--cuda", "-m", str(DATA / case), "--quant", "q8", "--kv", "f32"]
    arguments += ["-c", "64", "--prompt-ids", ids, "-n", "8", "--temp", "0", "--ignore-eos"]
    assert main([*arguments, "--vram-budget", str(need - 1)]) == 0
    out, err = capsys.readouterr()
    assert f"--vram-budget {need} keeps all of them there" in err
    assert re.search(r"^preload: (\d+)/\1 weights, \S+ \wB on the device, ", err, re.MULTILINE)
    assert main([*arguments, "--vram-budget", str(need - 1), "--verify", "--min-flop", "0"]) == 0
    verified_out, err = capsys.readouterr()
    assert verified_out == out
    assert re.search(r"verified \d+ products of the GPU: 0 differ", err)
    assert main([*arguments, "--vram-budget", str(need)]) == 0
    whole_out, err = capsys.readouterr()
    assert "--vram-budget" not in err
    assert out == whole_out


@pytest.mark.parametrize("percent", [30, 75, 99])
@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_a_device_with_less_memory_than_the_budget(
    fake: FakeCuda, cpu_text: Callable[..., list[int]], case: str, percent: int
) -> None:
    """What lies there is used, the rest is computed; K/V of the segment may not fit either."""
    budget = whole(case) * percent // 100
    want = cpu_text(case)
    for memory in (budget // 2, budget, budget + 100_000):
        fake.set_memory(memory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with opened(case, budget) as model:
                assert text(model, prompt_of(case)) == want


# ---- a device that fails


@pytest.mark.parametrize("mode", ["segments", "projections"])
@pytest.mark.parametrize("case", [DENSE, EXPERTS])
def test_a_device_that_fails_in_the_middle(
    fake: FakeCuda, cpu_text: Callable[..., list[int]], case: str, mode: str
) -> None:
    """Every call to the device in turn: refused once, or the device lost with it."""
    prompt, want = prompt_of(case), cpu_text(case)
    for error in (INVALID_VALUE, ILLEGAL_ADDRESS):
        for kind in (Kind.MEMCPY, Kind.LAUNCH, Kind.SYNC):
            for n in (1, 6):
                fake.reset()
                with opened(case, whole(case) * 3 // 4, offload=mode) as model:
                    assert text(model, prompt, 3) == want[:3]
                    assert bool(engine_of(model).device.segment) == (mode == "segments")
                    fake.fail_at(n, error, kind)
                    with warnings.catch_warnings(record=True) as said:
                        warnings.simplefilter("always")
                        assert text(model, prompt) == want
                    if fake.fault_pending:
                        continue
                    words = [str(one.message) for one in said]
                    assert 1 <= len(words) <= 2, (kind, n, words)
                    if error == ILLEGAL_ADDRESS:
                        assert model.engine.name == "cpu"
                        assert "running on the CPU from here on" in words[0]
