"""The committed report of the last GPU check: whole, passed, and of the sources that are here."""

from __future__ import annotations

import importlib.util
import json

import pytest

from .conftest import ROOT

REPORT = ROOT / "tests/gpu/report.json"


def test_report_passed_on_a_gpu() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    assert report["passed"] is True
    assert report["tests"]["failed"] == 0
    assert report["tests"]["passed"] > 0
    assert not [name for name in report["tests"]["not_passed"] if name.startswith("tests.gpu")]
    assert set(report["sanitizer"]) >= {"memcheck", "racecheck", "initcheck"}


def test_report_fits_the_sources() -> None:
    """Not a failure, since CI has no GPU to mend it with; but it is said."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools/gpu_check.py")
    assert spec
    assert spec.loader
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    if report["sources_sha256"] != gpu_check.sources_hash():
        pytest.skip(
            "native/ has changed since tests/gpu/report.json: run tools/gpu_check.py on a GPU "
            f"(the report is of {report['date']}, {report['gpu']})"
        )
