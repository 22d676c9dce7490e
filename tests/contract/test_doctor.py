"""`pykestrel doctor`: what it says of machines in order, without a GPU, and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import ILLEGAL_ADDRESS, FakeCuda, Kind

from pykestrel import doctor, machine, native
from pykestrel.native import loader

pytestmark = pytest.mark.usefixtures("fresh_loader")


def shown(result: dict[str, Any]) -> str:
    """The rendered report, after checks that hold for every report."""
    json.dumps(result)
    text = doctor.render(result)
    assert text.isascii()
    last = text.split("\n")[-1]
    assert last.lower() == result["conclusion"].lower()
    return text


def test_cpu_only_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYKESTREL_LIB", raising=False)
    monkeypatch.setattr(loader, "_packaged", lambda name: None)
    result = doctor.report()
    text = shown(result)
    assert doctor.exit_code(result) == 0
    assert result["engine"] == "cpu"
    assert "models run on the CPU (NumPy" in result["conclusion"]
    assert "not installed" in result["conclusion"]
    for word in ("Python", "processor", "memory", "NumPy", "tokenizers", "CUDA library", "cache"):
        assert word in text


def test_broken_library_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libvcuda.so"
    path.write_bytes(b"\0" * 100)
    monkeypatch.setenv("PYKESTREL_LIB", str(path))
    result = doctor.report()
    text = shown(result)
    assert doctor.exit_code(result) == 1
    assert "the CUDA library is broken" in result["conclusion"]
    assert result["library"]["attempts"][0]["outcome"] in text


def test_gpu(fake_cuda: FakeCuda) -> None:
    fake_cuda.devices(3)
    fake_cuda.without_code(2)
    fake_cuda.fail_at(4, ILLEGAL_ADDRESS, Kind.LAUNCH)  # the second self-test of device 1
    result = doctor.report()
    text = shown(result)
    assert doctor.exit_code(result) == 0
    assert "Fake GPU 0, compute capability 9.0, 132 SMs, sm_90 code" in text
    assert "peak 4,917 GB/s" in text
    assert "self-test passed in" in text
    assert "NO CODE for it" in text
    assert "this library has no code for device 2" in text
    assert "lost" not in result["gpus"][0]
    assert not result["gpus"][1]["usable"]  # its second self-test loses it
    assert result["driver"]["cuda"] == "13.1"
    assert "note: it is of version 0.0.0-emulated" in text
    assert "Fake GPU 0" in result["conclusion"]


def test_required_package_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.REQUIRED, "tokenizers", "tokenizers_that_is_not_there")
    result = doctor.report()
    text = shown(result)
    assert doctor.exit_code(result) == 1
    assert "nothing runs: tokenizers cannot be imported" in result["conclusion"]
    assert "tokenizers_that_is_not_there" in text


def test_secrets_stay_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKESTREL_API_KEY", "hidden")
    monkeypatch.setenv("PYKESTREL_CTX_SIZE", "4096")
    result = doctor.report()
    assert result["environment"]["PYKESTREL_API_KEY"] == "(set)"
    assert "hidden" not in shown(result)
    assert "PYKESTREL_CTX_SIZE=4096" in shown(result)


AVX512 = "fpu avx2 fma avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("kernel", "flags", "vendor", "wrong"),
    [
        ("SkylakeX", AVX512, "GenuineIntel", False),
        ("Haswell", AVX512, "GenuineIntel", True),
        ("Prescott", AVX512, "GenuineIntel", True),
        ("Zen", AVX512, "AuthenticAMD", False),
        ("Zen", AVX512, "GenuineIntel", True),
        ("Haswell", "avx2 fma", "GenuineIntel", False),
        ("Nehalem", "avx2 fma", "AuthenticAMD", True),
        ("Nehalem", "sse4_2", "GenuineIntel", False),
        ("neoversen1", "", "", False),
    ],
)
def test_blas_kernel(
    monkeypatch: pytest.MonkeyPatch, kernel: str, flags: str, vendor: str, wrong: bool
) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    blas = {"name": "openblas", "kernel": kernel}
    note = machine.blas_note(blas, flags, vendor)
    assert (note is not None) == wrong
    if note:
        assert kernel in note
        monkeypatch.setenv("OPENBLAS_CORETYPE", kernel)
        assert f"OPENBLAS_CORETYPE={kernel}" in str(machine.blas_note(blas, flags, vendor))


def test_blas_that_is_not_openblas() -> None:
    assert machine.blas_note({"name": "mkl", "kernel": None}, AVX512, "GenuineIntel") is None


def test_memory() -> None:
    memory = machine.memory()
    assert memory["total"] is not None
    assert memory["total"] > 1 << 28
    assert memory["available"] is None or 0 < memory["available"] <= memory["total"]


def test_unusable_home_is_not_fatal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("PYKESTREL_CACHE", str(tmp_path / "file" / "cache"))
    result = doctor.report()
    assert not result["caches"]["pykestrel"]["writable"]
    assert "NOT WRITABLE" in shown(result)


def test_loading_is_not_forced_by_reading_state() -> None:
    assert isinstance(native.state().reason, str)


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (999.5, 0.0, 0.0), raising=False)
    assert "BUSY, load average 999.5 on" in shown(doctor.report())
    assert "--threads" in doctor.render(doctor.report())
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    assert "BUSY" not in doctor.render(doctor.report())
