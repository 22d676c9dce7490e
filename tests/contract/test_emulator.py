"""The emulated CUDA runtime itself: the tests of the kernels are worth as much as it is."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import native_build
import numpy as np
import pytest

SOURCES = ["native/tests/emulator_cases.cpp", "native/tests/emulator_mistakes.cpp"]
GOOD = [
    "barriers",
    "early_return",
    "indices",
    "shuffles",
    "votes",
    "products",
    "intrinsics",
    "fresh_memory_is_poisoned",
    "limits",
    "lazy",
    "graphs",
    "faults",
    "overlap",
]
# What the emulator says when a kernel does what no GPU can do.
BAD = {
    "bad_missed_barrier": r"40 \(the first is thread 0\) at __syncthreads in missed_barrier_kernel",
    "bad_returned_lane": r"block \(0, 0, 0\) of 32 threads: lane 3 of warp 0 has returned",
    "bad_partial_warp": "lane 3 of warp 0 has returned or is not there",
    "bad_unnamed_lane": "lane 0 shuffles with lane 20, which its mask 0x0000ffff does not name",
    "bad_no_pdl_wait": "no thread called pdl_wait",
    "bad_early_trigger": "called pdl_trigger before pdl_wait",
    "bad_overrun": "byte 0 behind an allocation of 32 bytes was written",
}
# What the sanitizers find besides.
SANITIZED = {
    "bad_early_read": "use-after-poison.*late_wait_kernel",
    "bad_overrun": "heap-buffer-overflow.*overrun_kernel",
    "bad_shared_overrun": "heap-buffer-overflow.*shared_overrun_kernel",
    "bad_fixed_overrun": "index 8 out of bounds",
    "bad_host_access": "use-after-poison",
}


@pytest.fixture(scope="session")
def program() -> Path:
    if native_build.compiler() is None:
        pytest.skip("needs g++ on Linux")
    return native_build.build_program(SOURCES)


@pytest.fixture(scope="session")
def sanitized_program() -> Path:
    if native_build.compiler() is None:
        pytest.skip("needs g++ on Linux")
    return native_build.build_program(SOURCES, sanitize=True)


def call(program: Path, case: str, given: bytes = b"") -> tuple[int, bytes, str]:
    # A program that was built with the sanitizers needs no preload.
    env = {k: v for k, v in native_build.sanitized_environment().items() if k != "LD_PRELOAD"}
    done = subprocess.run(
        [program, case], input=given, capture_output=True, check=False, env={**os.environ, **env}
    )
    return done.returncode, done.stdout, done.stderr.decode("utf-8", "replace")


def test_every_case_is_here(program: Path) -> None:
    names = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(names) == sorted({*GOOD, "half", *BAD, *SANITIZED})


@pytest.mark.parametrize("case", GOOD)
def test_case(program: Path, case: str) -> None:
    status, _, said = call(program, case)
    assert status == 0, said


@pytest.mark.parametrize("case", GOOD)
def test_case_under_the_sanitizers(sanitized_program: Path, case: str) -> None:
    status, _, said = call(sanitized_program, case)
    assert status == 0, said


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_found(program: Path, case: str) -> None:
    status, _, said = call(program, case)
    assert status != 0
    assert said.startswith("emulator: ")
    # addr2line, when it is there, turns addresses into names
    if "+0x" not in said:
        assert re.search(BAD[case], said), said


@pytest.mark.parametrize("case", SANITIZED)
def test_the_sanitizers_find_mistakes(sanitized_program: Path, case: str) -> None:
    status, _, said = call(sanitized_program, case)
    assert status != 0
    assert re.search(SANITIZED[case], said, flags=re.DOTALL), said


def test_half_precision_equals_numpy(program: Path) -> None:
    random = np.random.default_rng(0)
    values = np.concatenate(
        [
            random.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32),  # every magnitude
            random.normal(0, 1, 100_000).astype(np.float32),
            (random.normal(0, 1, 50_000) * 2.0**-24).astype(np.float32),  # subnormals
            # every float16, and what lies in the middle between it and the next one
            np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32),
            (np.arange(0x7C00, dtype=np.float32) + 0.5) * np.float32(2.0**-24),
            np.float32([65503.99, 65504, 65519.996, 65520, 65536, np.inf, -np.inf, np.nan, -0.0]),
        ]
    )
    status, out, said = call(program, "half", values.tobytes())
    assert status == 0, said
    widened = np.frombuffer(out[: 4 * 65536], np.float32)
    expected = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(widened), nan)
    assert np.array_equal(widened.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])

    narrowed = np.frombuffer(out[4 * 65536 :], np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = values.astype(np.float16)
    nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(narrowed.view(np.float16)), nan)
    assert np.array_equal(narrowed[~nan], wanted.view(np.uint16)[~nan])
