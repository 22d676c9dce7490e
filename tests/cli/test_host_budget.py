"""--host-budget: as many of the CPU's weights in memory, the rest in a file; the same bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pykestrel
from pykestrel import OutOfMemory
from pykestrel.engine.cpu import Store
from pykestrel.engine.cpu.memory import memory_needed

from .conftest import Cli

DATA = Path(__file__).parents[1] / "golden" / "data"
CASES = ("qwen3-untied", "qwen3-tied", "qwen3-moe-mixed", "qwen2")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_what_is_needed_is_known_to_the_byte(tmp_path: Path) -> None:
    for case in CASES:
        with pykestrel.load(DATA / case, device="cpu", quant="q4", ctx_size=64) as model:
            need = memory_needed(model.config, "q4", 64, "int8")["matrices"]
            assert model.session.engine.stats()["host_wanted"] == need


def test_a_quantised_directory_is_read_layer_by_layer_too(cli: Cli, tmp_path: Path) -> None:
    assert (
        cli("quantize", str(DATA / "qwen3-moe"), str(tmp_path / "q4"), "--quant", "q4").returncode
        == 0
    )
    seen: list[int] = []
    with pykestrel.load(tmp_path / "q4", device="cpu", ctx_size=64, cpu_cache=0) as model:
        want = model.logits(IDS)
    with pykestrel.load(
        tmp_path / "q4",
        device="cpu",
        ctx_size=64,
        cpu_cache=0,
        host_budget=0,
        progress=lambda name, done, total: seen.append(done * 1000 // total),
    ) as model:
        assert model.logits(IDS).tobytes() == want.tobytes()
        assert model.loaded.weights == model.loaded.wanted
    assert seen == sorted(seen)
    assert seen[-1] == 1000


def test_the_command_says_what_would_change_it(cli: Cli) -> None:
    args = ["run", "--cpu", "-m", str(DATA / "qwen3-untied"), "--prompt-ids", "1,2,3", "-n", "4"]
    args += ["--temp", "0", "--ignore-eos"]
    free = cli(*args)
    tight = cli(*args, "--host-budget", "1000")
    assert (tight.returncode, tight.stdout) == (0, free.stdout)
    (line,) = [line for line in tight.stderr.splitlines() if "--host-budget" in line]
    words = line.split()
    value = words[words.index("--host-budget") + 1]
    assert "--host-budget" not in cli(*args, "--host-budget", value).stderr
    assert "--host-budget" in cli(*args, "--host-budget", str(int(value) - 1)).stderr


def test_a_disk_without_room_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = r"--host-budget 1000 leaves 30 KB of .* no space left .* take --host-budget 31000$"
    with pytest.raises(OutOfMemory, match=words):
        Store(1000, tmp_path, 31_000).take(7000)
    assert not list(tmp_path.iterdir())


def test_what_is_seldom_used_leaves_the_memory_to_others(tmp_path: Path) -> None:
    store = Store(100, tmp_path, 150)
    assert len(store.take(60, seldom=True)) == 60
    assert (store.memory, store.spilled) == (0, 60)
    store.take(90)[:] = 1
    assert (store.memory, store.spilled) == (90, 60)
    roomy = Store(150, tmp_path, 150)
    roomy.take(60, seldom=True)
    assert (roomy.memory, roomy.spilled) == (60, 0)
