"""What a command says of a model that is in part on the GPU, where it is not, and where the flags
contradict the environment or each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from fake_cuda import FakeCuda

from pykestrel.cli.main import main

from .conftest import CudaLib
from .device_models import DATA
from .test_offload import DENSE, EXPERTS, whole


@pytest.fixture(autouse=True)
def nothing_is_left(nothing_left: Callable[[], None]) -> Iterator[None]:
    yield
    nothing_left()


def run(capsys: pytest.CaptureFixture[str], *flags: str, case: str = EXPERTS) -> tuple[str, str]:
    """stdout and stderr of three tokens."""
    model = ["-m", str(DATA / case), "--quant", "q8", "-c", "64", "--prompt-ids", "1,2,3"]
    assert main(["run", *model, "-n", "3", "--temp", "0", "--ignore-eos", *flags]) == 0
    seen = capsys.readouterr()
    return seen.out, seen.err


def test_a_verification_that_saw_nothing_says_so(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["--vram-budget", str(whole(EXPERTS) // 2)]
    _, err = run(capsys, *budget, "--verify", "--min-flop", "1e12")
    assert "nothing was verified: the GPU computed no product (" in err
    assert "below --min-flop 1000000000000 stay on the CPU" in err
    _, err = run(capsys, *budget, "--min-flop", "1e12")
    assert "verified" not in err
    _, err = run(capsys, *budget, "--verify", "--min-flop", "0")
    assert "products of the GPU: 0 differ" in err


def test_all_but_the_embedding_is_not_called_a_rest_of_matrices(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = run(capsys, "--vram-budget", str(whole(DENSE) - 1), case=DENSE)
    assert "the CPU runs the model, as its embedding or a little more has no room there: " in err
    _, err = run(capsys, "--vram-budget", str(whole(DENSE) // 2), case=DENSE)
    assert "weights are on the GPU and the CPU computes the rest: " in err


def test_details_name_the_layers_and_the_gate(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = str(whole(EXPERTS) * 3 // 4)
    _, err = run(capsys, "-v", "--vram-budget", budget, "--min-flop", "77")
    assert "as a whole; --min-flop 77)" in err


def test_a_budget_of_a_gpu_that_is_not_there_is_said(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYKESTREL_LIB", "/nowhere.so")
    out, err = run(capsys, "--vram-budget", "100KB")
    assert "--vram-budget has no effect: the model runs on the CPU (" in err
    alone, err = run(capsys)
    assert out == alone
    assert "--vram-budget" not in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--min-flop", "5"), "--min-flop has no effect: without --vram-budget the GPU holds all"),
        (
            ("--offload", "projections", "--cpu"),
            "--offload has no effect: the model runs on the CPU",
        ),
        (
            ("--cpu", "--offload", "projections", "--min-flop", "5"),
            "--offload and --min-flop have no effect: the model runs on the CPU (asked for)",
        ),
    ],
)
def test_settings_of_a_part_without_one_are_said(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    _, err = run(capsys, *flags)
    assert said in err
    assert err.count("no effect") == 1


def test_settings_of_a_part_are_kept_for_models_that_do_not_fit(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment, or beside a budget that holds all of this one."""
    monkeypatch.setenv("PYKESTREL_OFFLOAD", "projections")
    monkeypatch.setenv("PYKESTREL_MIN_FLOP", "5")
    for flags in ((), ("--cpu",), ("--vram-budget", "1GB")):
        _, err = run(capsys, *flags)
        assert "no effect" not in err
    _, err = run(capsys, "-v", "--vram-budget", str(whole(EXPERTS) // 2))
    assert "--min-flop 5)" in err
    assert "as a whole" not in err


def test_a_flag_silences_a_variable_that_contradicts_it(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = str(whole(EXPERTS) // 2)
    monkeypatch.setenv("PYKESTREL_DEVICE", "cpu")
    _, err = run(capsys, "--vram-budget", budget)
    assert "weights are on the GPU and the CPU computes the rest" in err
    monkeypatch.delenv("PYKESTREL_DEVICE")
    monkeypatch.setenv("PYKESTREL_VRAM_BUDGET", budget)
    _, err = run(capsys, "--cpu")
    assert "GPU" not in err


def test_bench_of_a_part_names_what_is_there_and_the_threads(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["-m", str(DATA / EXPERTS), "--quant", "q8", "--vram-budget", str(whole(EXPERTS) // 2)]
    tests = ["-p", "4", "-n", "2", "-r", "1"]
    assert main(["bench", *model, *tests, "--min-flop", "0"]) == 0
    out = capsys.readouterr().out
    assert "of peak" not in out
    assert re.search(r"on offload with \d+ threads? \(.*: \d+ of \d+ weights", out)
    assert "NumPy" in out
    assert main(["bench", *model, *tests, "--min-flop", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["backend"] == "offload"
    assert "weights" in facts["running"]
    assert facts["gpu"]["read_bytes_per_second"] is None
    assert facts["engine_stats"]["device_weights"] > 0


def test_random_weights_without_room_are_not_told_to_be_a_part(
    fake: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--synthetic", "qwen3-8b"]) == 3
    err = capsys.readouterr().err
    assert "; try --quant q4" in err or "; try a smaller model" in err
    assert "--vram-budget" not in err


@pytest.mark.parametrize("flags", [["--offload", "projections"], ["--min-flop", "1e6"]])
def test_random_weights_are_on_the_gpu_alone(
    cuda_lib: CudaLib, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(["bench", "--synthetic", "qwen3-0.6b", *flags]) == 2
    assert f"--synthetic has its weights on a GPU alone: it excludes {flags[0]}" in (
        capsys.readouterr().err
    )
