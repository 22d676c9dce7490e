"""The command line on a GPU, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_cuda import FakeCuda, Kind

import pykestrel
from pykestrel import native
from pykestrel.errors import KestrelError

from .conftest import CudaLib
from .device_models import DATA

ROOT = Path(__file__).resolve().parents[2]
IDS = ("--prompt-ids", "5,6,7", "-n", "4", "--temp", "0", "--ignore-eos")

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(cuda_lib: CudaLib) -> Cli:
    def run(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYKESTREL_")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        clean |= {"PYKESTREL_LIB": str(native.find().path), "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-m", "pykestrel", *map(str, args)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**clean, **env},
            timeout=300,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def test_run(cli: Cli) -> None:
    model = DATA / "qwen3-tied"
    ours = cli("run", "-m", model, "--cuda", "--quant", "bf16", *IDS)
    assert ours.returncode == 0
    assert ours.stderr.startswith("preload: ")
    assert len(ours.stderr.splitlines()) == 1
    assert len(ours.stdout.split(",")) == 4
    assert cli("run", "-m", model, "--cpu", "--quant", "bf16", *IDS).stdout == ours.stdout
    auto = cli("run", "-m", model, "--quant", "bf16", *IDS, "-v")
    assert auto.stdout == ours.stdout
    assert "on cuda" in auto.stderr
    checked = cli("run", "-m", model, "--cuda", "--verify", "--quant", "bf16", *IDS, "-q")
    assert (checked.stdout, checked.stderr) == (ours.stdout, "")
    mixed = cli("run", "-m", model, "--cuda", "--prefill", "cpu", "--quant", "bf16", *IDS, "-q")
    assert (mixed.stdout, mixed.stderr) == (ours.stdout, "")


def test_prof(cli: Cli) -> None:
    done = cli("run", "-m", DATA / "qwen3-tied", "--cuda", *IDS, PYKESTREL_PROF="1")
    assert done.returncode == 0
    assert "\nPROF qwen3: 6 tokens\n" in done.stderr  # the last one is not fed back
    assert "1.00" not in done.stdout


def test_bench(cli: Cli) -> None:
    args = ("-m", DATA / "qwen3-moe-mixed", "-p", "3", "-n", "3", "-d", "0,100", "-r", "1")
    done = cli("bench", *args, "--cuda", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "of peak" in lines[0]
    assert any(line.startswith("tg3 @ d100: a token is 1.00 launches, 1.00 ") for line in lines)
    first, second = (
        json.loads(cli("bench", *args, "--cuda", "--json").stdout.splitlines()[-1])
        for _ in range(2)
    )
    assert first["backend"] == "cuda"
    assert first["gpu"]["name"] in done.stdout
    for a, b in zip(first["tests"], second["tests"], strict=True):
        assert a["logits_hash"] == b["logits_hash"]  # the same bits every time
    alone = cli("bench", *args[:-3], "100", "-r", "1", "--cuda", "--json")
    (_, same) = json.loads(alone.stdout.splitlines()[-1])["tests"]
    assert same["logits_hash"] == first["tests"][3]["logits_hash"]  # whatever was measured before
    per_token = first["tests"][1]["per_token"]
    assert (per_token["h2d_copies"], per_token["d2h_copies"], per_token["launches"]) == (1, 1, 1)
    assert first["engine_stats"]["cache_misses"] == 0


def test_doctor_and_info(cli: Cli) -> None:
    done = cli("doctor", "--json")
    report = json.loads(done.stdout)
    assert (report["engine"], report["ok"]) == ("cuda", True)
    assert report["conclusion"].startswith("models run on the GPU (")
    gpu = report["conclusion"].removeprefix("models run on the GPU (").removesuffix(")")
    info = json.loads(cli("info", DATA / "qwen3-tied", "--json").stdout)
    assert info["engine"] == "cuda"
    assert set(info["gpu_needs"]) == {"bf16", "q8", "q4"}
    assert (
        cli("info", DATA / "qwen3-tied").stdout.splitlines()[-1].startswith(f"On {gpu} it needs ")
    )
    info = cli("info", DATA / "llama-yarn", "--json")
    assert json.loads(info.stdout)["engine"] == "cpu"
    assert "head_dim is 20" in info.stderr


def test_nothing_is_measured_on_the_cpu_instead(fake: FakeCuda) -> None:
    from pykestrel.cli.measure import Subject, Test, measure

    with pykestrel.load(DATA / "llama-gqa3", device="cuda", ctx_size=32) as model:

        def strike(run: int) -> None:
            if run == 1:
                fake.fail_at(1, kind=Kind.LAUNCH)

        with (
            pytest.warns(UserWarning, match="running on the CPU from here on"),
            pytest.raises(KestrelError, match="the GPU failed in the middle of tg4, which is not"),
        ):
            measure(Subject.of(model), Test("tg", 4, 0), [1, 2, 3, 4, 5], 2, strike)
