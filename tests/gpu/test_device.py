"""A real GPU: what the driver says of it, the self-test kernel, and the counters."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pykestrel import doctor, native

pytestmark = pytest.mark.gpu


def test_query() -> None:
    for index in range(native.dev_count()):
        info = native.dev_query(index)
        assert info.index == index
        assert info.name
        assert info.uuid.startswith("GPU-")
        assert info.cc_major >= 8
        assert info.kernel_arch == 10 * info.cc_major + info.cc_minor or info.kernel_arch > 0
        assert info.sm_count > 0
        assert 0 < info.memory_free <= info.memory_total
        assert info.l2_bytes > 0
        assert info.driver_version >= info.runtime_version >= 12000
        assert info.peak_bytes_per_second == 0 or 1e11 < info.peak_bytes_per_second < 1e14


def test_query_agrees_with_nvidia_smi() -> None:
    if not shutil.which("nvidia-smi"):
        pytest.skip("needs nvidia-smi")
    fields = "uuid,name,compute_cap"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {tuple(cell.strip() for cell in line.split(",")) for line in done.stdout.splitlines()}
    for index in range(native.dev_count()):
        info = native.dev_query(index)
        assert (info.uuid, info.name, f"{info.cc_major}.{info.cc_minor}") in rows


def test_index_out_of_range() -> None:
    count = native.dev_count()
    for index in (count, -1):
        with pytest.raises(native.NativeError, match=f"no device {index}: this machine shows"):
            native.dev_query(index)


def test_selftest_and_counters() -> None:
    with native.create(0) as handle:
        assert native.prof_read(handle).launches == 0
        for _ in range(3):
            native.dev_selftest(handle)
        prof = native.prof_read(handle)
        assert (prof.launches, prof.h2d_copies, prof.d2h_copies) == (3, 3, 3)
        assert (prof.h2d_bytes, prof.d2h_bytes) == (3 * 1024, 3 * 1024)
        assert prof.h2d.count == prof.d2h_sync.count == 3
        assert 0 < prof.d2h_sync.ns < 10e9
        native.prof_reset(handle)
        assert native.prof_read(handle).launches == 0


def test_handles_give_their_memory_back() -> None:
    native.dev_query(0)  # the context is there from now on
    before = native.dev_query(0).memory_free
    for _ in range(50):
        with native.create(0) as handle:
            native.dev_selftest(handle)
    assert native.dev_query(0).memory_free >= before - (64 << 20)


def test_doctor_finds_it() -> None:
    report = doctor.report()
    assert doctor.exit_code(report) == 0
    assert report["gpus"][0]["usable"]
    assert report["gpus"][0]["name"] in doctor.render(report)
