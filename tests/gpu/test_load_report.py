"""Loading onto the device: mapped files, what is told of it, and what was predicted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from model_files import make_gguf

import pykestrel
from pykestrel import CudaUnavailable, LoadMeter, native
from pykestrel.cli.models import tell_residency
from pykestrel.cli.terminal import Terminal
from pykestrel.doctor import model_report
from pykestrel.engine.cuda import SmallWeights, decode_config, device_need, entries
from pykestrel.engine.offload import choose, weights_of
from pykestrel.loading import on_device, read_config, resolve_model, save_quantized, tensors
from pykestrel.loading.on_device import resident
from pykestrel.prediction import predict
from pykestrel.shapes import shape
from pykestrel.units import parse_bytes

from .conftest import CudaLib
from .device_models import DATA
from .test_command_line import IDS, Cli, cli  # noqa: F401 - a fixture
from .test_device_loading import same_as_on_the_cpu

pytestmark = pytest.mark.usefixtures("nothing_left")

PRELOAD = r"preload: (\d+)/(\d+) weights, \S+ [KM]?B in (\d+) entries on the device, \d+\.\d s"


@pytest.fixture(params=["mapped", "read"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to a file's bytes, also for tensors of a few rows."""
    if request.param == "mapped":
        if not tensors.can_map():
            pytest.skip("files cannot be mapped and fetched here")
        monkeypatch.setattr(tensors, "_LEAST_MAPPED", 1)
        monkeypatch.setattr(on_device, "_PIECE", 8 << 10)  # several pieces a tensor
    else:
        monkeypatch.setattr(tensors, "_madvise", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("quant", ["bf16", "q4"])
@pytest.mark.parametrize("case", ["qwen3-moe-mixed", "llama-gqa3"])
def test_either_way_loads_the_same(cuda_lib: CudaLib, reader: str, case: str, quant: str) -> None:
    same_as_on_the_cpu(DATA / case, quant)


def test_other_files_either_way(cuda_lib: CudaLib, reader: str, tmp_path: Path) -> None:
    save_quantized(resolve_model(str(DATA / "qwen3-tied")), tmp_path / "q4", "q4")
    same_as_on_the_cpu(tmp_path / "q4", "q4")
    pytest.importorskip("gguf")
    same_as_on_the_cpu(make_gguf("qwen3-moe", tmp_path / "model.gguf", kind="Q8_0"), "q8")
    same_as_on_the_cpu(make_gguf("llama-gqa3", tmp_path / "plain.gguf", kind="F32"), "q8")


def test_what_the_meter_says(cuda_lib: CudaLib) -> None:
    seen: list[tuple[int, int]] = []
    meter = LoadMeter()

    def watch(name: str, done: int, total: int) -> None:
        seen.append((meter.weights, meter.bytes))
        assert meter.bytes == done <= total

    with pykestrel.load(
        DATA / "qwen3-moe", device="cuda", quant="q8", progress=watch, meter=meter
    ) as model:
        assert model.loaded is meter
        assert seen == sorted(seen)
        assert meter.weights == meter.wanted > 30
        busy = meter.read_s + meter.convert_s + meter.upload_s + meter.waiting_s
        assert min(meter.read_s, meter.convert_s, meter.upload_s, meter.waiting_s) >= 0
        assert 0 < busy < meter.threads * meter.wall_s + 0.5
        assert 0 < meter.reserve_s + meter.finish_s < meter.wall_s
        assert meter.wall_s <= model.load_s
        r = meter.resident
        assert r is not None
        assert r.complete
        handle = model.session.engine.handle  # type: ignore[attr-defined]
        assert r == resident(handle, model.config, "q8")
        assert r.entries == r.wanted == len(entries(model.config, "q8"))
        assert r.bytes == native.cache_stats(handle).bytes
        facts = meter.facts()
        assert facts["device"]["entries"] == r.entries
        assert facts["bytes"] == meter.bytes > 0


def test_a_load_that_fails_counts_no_weight_too_many(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = LoadMeter()

    def stop(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pykestrel.load(DATA / "qwen3-moe", device="cuda", progress=stop, meter=meter)
    assert meter.weights <= meter.wanted
    assert meter.resident is None


def test_a_gpu_that_fails_late_leaves_nothing_in_the_counts(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are on the device when it has no memory left for the K/V: the CPU's loading is
    counted then, and nothing is said to lie on a device."""
    meter = LoadMeter()

    def full(*_: Any) -> None:
        raise native.NativeError("the K/V needs 1 GB of device memory and 0 bytes are free", -1)

    monkeypatch.setattr(native, "dev_decode_init", full)
    with pytest.warns(UserWarning, match="running on the CPU: the K/V needs 1 GB"):
        model = pykestrel.load(DATA / "qwen3-moe", meter=meter)
    with model:
        assert model.engine.name == "cpu"
        assert meter.weights == meter.wanted > 0
        assert meter.resident is None
        assert "device" not in meter.facts()


def test_the_first_token_builds_nothing(fake: FakeCuda) -> None:
    """The calls of a first run are those of every run: no graph is captured, no memory taken."""
    with pykestrel.load(DATA / "qwen3-tied", device="cuda", ctx_size=32) as model:
        for settings in ({"temperature": 0}, {"temperature": 1.0, "seed": 1, "top_k": 5}):
            calls = []
            for _ in range(2):
                before, used = fake.calls, fake.memory_used
                model.generate([5, 6, 7], max_tokens=3, ignore_eos=True, reuse=False, **settings)
                calls.append(fake.calls - before)
                assert fake.memory_used == used
            assert calls[0] == calls[1], settings


# -- what the command line says -------------------------------------------------------------------


def test_the_preload_line(cli: Cli) -> None:  # noqa: F811
    args = ("run", "-m", DATA / "qwen3-tied", "--cuda", *IDS)
    done = cli(*args)
    (line,) = done.stderr.splitlines()
    found = re.fullmatch(PRELOAD, line)
    assert found is not None, line
    wanted = len(entries(read_config(resolve_model(str(DATA / "qwen3-tied"))), "q8"))
    assert found[1] == found[2] == "35"
    assert int(found[3]) == wanted
    quiet = cli(*args, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")
    assert cli("run", "-m", DATA / "qwen3-tied", "--cpu", *IDS).stderr == ""
    told = cli(*args, "-v").stderr
    assert re.search(
        r"^loaded in \d+\.\d\d s, weights \d+\.\d\d s; \d+ threads? busy: read \d+\.\d\d s, "
        r"convert \d+\.\d\d s, upload \d+\.\d\d s$",
        told,
        re.MULTILINE,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix thing")
def test_the_preload_line_on_a_terminal(cuda_lib: CudaLib, tmp_path: Path) -> None:
    sys.path.insert(0, str(DATA.parents[1]))
    from cli.pty_session import PtySession

    env = {k: v for k, v in os.environ.items() if not k.startswith("PYKESTREL_")}
    env |= {"TERM": "xterm", "PYKESTREL_LIB": str(native.find().path)}
    env["PYTHONPATH"] = os.pathsep.join([str(DATA.parents[2]), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pykestrel", "run", "-m", str(DATA / "qwen3-tied"), "--cuda"]
    session = PtySession([*command, *IDS], env=env, cwd=tmp_path)
    try:
        session.expect(PRELOAD)
        assert session.wait() == 0
    finally:
        session.close()


class Heard(Terminal):
    """A terminal that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_a_weight_that_does_not_stay_is_a_warning(cuda_lib: CudaLib) -> None:
    with pykestrel.load(DATA / "qwen3-tied", device="cuda") as model:
        heard = Heard()
        tell_residency(heard, model.loaded, model.session.engine)
        assert heard.warnings == []
        handle = model.session.engine.handle  # type: ignore[attr-defined]
        for entry in entries(model.config, model.quant):
            native.cache_pin(handle, entry.key, False)
        native.cache_budget(handle, native.cache_stats(handle).bytes - 1)
        model.loaded.resident = resident(handle, model.config, model.quant)
        tell_residency(heard, model.loaded, model.session.engine)
        (line,) = heard.warnings
        r = model.loaded.resident
        assert r.entries < r.wanted
        assert line.startswith(f"only {r.entries} of {r.wanted} entries of weights stay on the dev")
        assert f"({r.evictions} were dropped for room)" in line
        for setting in ("--quant q4", "--ctx-size", "at the cost of"):
            assert setting in line


# -- what was predicted ---------------------------------------------------------------------------


def tries(source: str, **options: Any) -> bool:
    """Whether it loads on the device."""
    with contextlib.suppress(CudaUnavailable), pykestrel.load(source, device="cuda", **options):
        return True
    return False


def test_a_prediction_comes_true(fake: FakeCuda) -> None:
    name = str(DATA / "qwen3-tied")
    config = read_config(resolve_model(name))
    needs = {kind: device_need(config, kind, 512, "int8").total for kind in ("bf16", "q8", "q4")}
    assert needs["q4"] < needs["q8"] < needs["bf16"]
    for kind, need in needs.items():
        for memory in (need + (1 << 20), need - 1):
            fake.set_memory(memory)
            fate = predict(config, kind, 512, "int8")
            assert (fate.needs, fate.free) == (need, memory)
            assert fate.fits == fate.resident == (memory >= need)
            assert tries(name, quant=kind) == fate.fits
            assert fate.engine == ("cuda" if fate.fits else "cpu")
            assert fate.line().startswith("yes: as" if fate.fits else "no: as")
    fake.set_memory(needs["q8"])
    advice = predict(config, "bf16", 512, "int8").advice
    assert "--quant q8 (" in advice
    assert "--quant q4 (" in advice
    fixed = predict(config, "bf16", 512, "int8", fixed_quant=True)
    assert "--quant" not in fixed.advice
    said = model_report(name, "bf16", None, "int8")
    assert said["fits"] == predict(config, "bf16", 512, "int8").line()
    with pytest.raises(CudaUnavailable, match=r"try --quant q8 \(\d"):
        pykestrel.load(name, device="cuda", quant="bf16")


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-32b"])
@pytest.mark.parametrize("quant", ["q8", "q4"])
def test_the_part_that_is_named_leaves_room_for_what_its_layers_need(
    fake: FakeCuda, name: str, quant: str
) -> None:
    """With --vram-budget as it says, K/V and buffers of the segment find room beside it."""
    config = shape(name)
    needed = device_need(config, quant, 4096, "int8")
    empty = np.empty((0, 0), np.float32)
    small, weights = SmallWeights.plain(config), weights_of(config, quant)
    for tenths in range(3, 10):
        memory = needed.decode + needed.margin + needed.weights * tenths // 10
        fake.set_memory(memory)
        named = re.search(r"--vram-budget (\S+)", predict(config, quant, 4096, "int8").advice)
        assert named
        part = choose(config, weights, parse_bytes(named[1], "vram_budget"), native.cache_size)
        assert part.segment
        layers = decode_config(
            config, small, 4096, "int8", (empty, empty), quant, layers=part.segment
        )
        held = sum(native.cache_size(entry.matrix) for one in part.parts for entry in one.entries)
        assert held + native.decode_size(layers) + needed.margin <= memory, tenths


def test_a_shape_that_no_kernel_runs_is_predicted_for_the_cpu(cuda_lib: CudaLib) -> None:
    fate = predict(read_config(resolve_model(str(DATA / "llama-yarn"))), "q8", 64, "int8")
    assert (fate.engine, fate.where, fate.fits) == ("cpu", "this machine", True)


def test_bench_says_how_it_was_loaded(cli: Cli) -> None:  # noqa: F811
    args = ("-m", DATA / "qwen3-tied", "-p", "3", "-n", "3", "--ttft", "5", "-r", "1", "--cuda")
    done = cli("bench", *args, "--json")
    result = json.loads(done.stdout)
    assert re.fullmatch(PRELOAD, done.stderr.strip())
    assert [t["test"] for t in result["tests"]] == ["pp3", "tg3", "ttft5"]
    assert all(t["built_in_window"] == 0 for t in result["tests"])
    load = result["load"]
    assert load["weights"] == load["wanted"] == 35
    assert load["device"]["entries"] == load["device"]["wanted"]
    assert 0 < load["wall_s"] <= result["load_seconds"]
    first = result["tests"][2]
    assert first["ttft_ms"] == pytest.approx(1000 * first["seconds"][0])
