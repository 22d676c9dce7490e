"""Weights beyond --host-budget lie in a file: right whatever the budget, and never in memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import pykestrel
from pykestrel.engine.cpu import CpuEngine, Store
from pykestrel.errors import KestrelError, OutOfMemory

DATA = Path(__file__).parents[1] / "golden" / "data"
CASES = ("qwen3-tied", "qwen3-untied", "qwen3-moe-mixed")


def logits(case: str, **given: object) -> tuple[np.ndarray, dict[str, int | bool]]:  # type: ignore[type-arg]
    settings = {"device": "cpu", "quant": "q4", "ctx_size": 64, "cpu_cache": 0, **given}
    with pykestrel.load(DATA / case, **settings) as model:
        engine = model.session.engine
        assert isinstance(engine, CpuEngine)
        return engine.forward([1, 2, 3], all_logits=True), engine.stats()


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_under_any_budget(
    case: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYKESTREL_CACHE", str(tmp_path))
    want, stats = logits(case, quant=quant)
    wanted = int(stats["host_wanted"])
    assert wanted >= 0.9 * stats["weights_bytes"]  # an embedding among them
    for budget in (0, 1, 4099, wanted // 2, wanted - 1, wanted):
        got, stats = logits(case, quant=quant, host_budget=budget)
        assert got.tobytes() == want.tobytes()
        assert stats["host_wanted"] == wanted
        assert stats["host_wanted"] - stats["spilled_bytes"] <= budget
    assert stats["spilled_bytes"] == 0
    assert list(tmp_path.iterdir()) == []


def test_float32_copies_are_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYKESTREL_CACHE", str(tmp_path))
    _, stats = logits("qwen3-tied", cpu_cache=None)
    copies, wanted = stats["expanded_bytes"], stats["host_wanted"]
    assert copies > 0
    for budget in (0, wanted, wanted + copies - 1):
        assert logits("qwen3-tied", cpu_cache=None, host_budget=budget)[1]["expanded_bytes"] == 0
    budget = wanted + copies
    _, stats = logits("qwen3-tied", cpu_cache=None, host_budget=budget)
    assert stats["expanded_bytes"] == copies


def test_matrices_share_a_descriptor(tmp_path: Path) -> None:
    """A mixture of experts has more matrices than a process may have files."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    before, size = opened(), 1000
    store = Store(0, tmp_path, wanted=2000 * 1024)
    buffers = [store.take(size) for _ in range(2000)]
    assert opened() - before <= 2
    for i, buffer in enumerate(buffers):
        buffer[:] = i % 251
    assert all((buffer == i % 251).all() for i, buffer in enumerate(buffers))
    assert store.spilled == 2000 * size
    del buffers, buffer, store
    gc.collect()
    assert opened() == before


def test_a_file_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutOfMemory, match=r"--host-budget 10 leaves 1 B .* cannot be made: .* 11$"):
        Store(10, tmp_path / "file").take(11)
    store = Store(10, tmp_path)
    with pytest.raises(OutOfMemory, match="cannot be made"):
        store.take(1 << 60)
    assert store.take(20).size == 20


def test_no_budget_needs_no_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise KestrelError("the home directory cannot be found")

    monkeypatch.setattr("pykestrel.files._home", none)
    for name in ("PYKESTREL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert logits("qwen3-tied")[0].shape[0] == 3
    with pytest.raises(KestrelError, match="home directory"):
        logits("qwen3-tied", host_budget=0)
