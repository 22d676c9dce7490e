"""The committed report of the last GPU check: whole, passed, and of the sources that are here."""

from __future__ import annotations

import importlib.util
import json
import math
from typing import Any

import pytest

from .conftest import ROOT

REPORT = ROOT / "tests/gpu/report.json"


# Why a test of tests/gpu may be skipped on a GPU.
FINE = ("emulated device only", "the demo model cannot be fetched")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8"))
    return read


def test_report_passed_on_a_gpu(report: dict[str, Any]) -> None:
    assert report["passed"] is True
    assert report["tests"]["failed"] == 0
    assert report["tests"]["passed"] > 0
    skipped = {k: v for k, v in report["tests"]["not_passed"].items() if k.startswith("tests.gpu")}
    assert not [k for k, v in skipped.items() if not any(reason in v for reason in FINE)]
    tools = {"memcheck", "racecheck", "initcheck", "synccheck"}
    assert set(report["sanitizer"]) >= {*tools, "racecheck of prompts"}
    assert report["programs"] == {"example.c": "exit 0", "embed.c": "exit 0"}


def test_report_shows_the_speed_that_an_h200_must_have(report: dict[str, Any]) -> None:
    assert len(report["benchmarks"]) >= 4
    for result in report["benchmarks"]:
        calls = 1 if result["kind"] == "tg" else math.ceil(result["n"] / 2048) / result["n"]
        for copies in ("h2d_copies", "d2h_copies"):
            assert result["per_token"][copies] == pytest.approx(calls)
        if "H200" in report["gpu"] and result["floor"] is not None:
            assert result["tokens_per_second"] >= result["floor"], result["arguments"]


def test_report_shows_how_fast_models_must_load_on_an_h200(report: dict[str, Any]) -> None:
    if "skipped" in report["loading"]:
        pytest.skip(f"loading was not measured: {report['loading']['skipped']}")
    assert len(report["loading"]["cases"]) >= 3
    for case in report["loading"]["cases"]:
        assert "error" not in case
        if "H200" in report["gpu"] and report["loading"]["cores"] >= 16:
            assert case["seconds"] <= case["limit"], case


def test_report_fits_the_sources(report: dict[str, Any]) -> None:
    """Not a failure, since CI has no GPU to mend it with; but it is said."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools/gpu_check.py")
    assert spec
    assert spec.loader
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    if report["sources_sha256"] != gpu_check.sources_hash():
        pytest.skip(
            "native/ has changed since tests/gpu/report.json: run tools/gpu_check.py on a GPU "
            f"(the report is of {report['date']}, {report['gpu']})"
        )
