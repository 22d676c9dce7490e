"""The emulated CUDA runtime itself: the tests of the kernels are worth as much as it is."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import native_build
import numpy as np
import pytest

SOURCES = [
    f"native/tests/emulator_{part}.cpp" for part in ("cases", "mistakes", "sm90", "sm90_mistakes")
]
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
    "products_f16",
    "matrices",
    "copies_async",
    "ring",
    "phases",
    "group_products",
    "column_products",
    "packed",
    "barrier_used_well",
    "group_used_well",
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
# The same of the instructions of kernels/ptx_sm90.cuh.
BAD_SM90 = {
    "misaligned_row": "misaligned_row_kernel.*load_matrix_x4 needs an address aligned to 16 bytes",
    "row_outside": "load_matrix_x4_trans needs 16 bytes of shared memory",
    "misaligned_copy": "gets byte 8 of dynamic shared memory in misaligned_copy_kernel",
    "copy_overrun": "copy_async_16 reads 16 bytes that are not all of one allocation",
    "unwaited_copy": "thread 0 returns with 1 copies under way that it never waited for",
    "barrier_not_made": "was not made with barrier_init",
    "barrier_made_twice": "was made already",
    "barrier_not_announced": "without barrier_init_done",
    "barrier_not_met": "no __syncthreads since its barrier_init",
    "barrier_overwritten": "the barrier at byte [0-9]+ of static shared memory was written to",
    "barrier_no_arrivals": "cannot have 0 arrivals",
    "barrier_one_arrival_more": "has all its 1 arrivals of this phase and waits for bytes",
    "barrier_too_few_bytes": "16 bytes announced, and copies of 32 bytes were started",
    "barrier_too_many_bytes": r"64 \(the first is thread 0\) at barrier_wait .*"
    "in phase 0, where 0 of 1 arrivals and 16 of 48 bytes are missing",
    "barrier_odd_bytes": "24 bytes, not a multiple of 16",
    "barrier_odd_address": "gets byte 4 of dynamic shared memory",
    "barrier_outside": "copy_bulk needs 32 bytes of shared memory",
    "barrier_overrun": "copy_bulk reads 48 bytes that are not all of one allocation",
    "barrier_not_waited": "the block ends while the copy_bulk .* is under way",
    "barrier_other_parity": "in phase 1, where 1 of 1 arrivals and 0 of 0 bytes are missing",
    "barrier_missed_phase": "later phase before this thread saw the end of phase 0",
    "barrier_written_under_way": "byte 20 of dynamic shared memory was written to while the copy",
    "barrier_copied_twice": "writes to byte 16 .* where the copy_bulk .* is still under way",
    "group_not_fenced": "without a wgmma_fence since its last wgmma_commit",
    "group_not_committed": "returns with 2 products under way that it did not commit",
    "group_not_waited": "returns with 2 products under way that it did not wait for",
    "group_other_rows": "lanes 0 and 5 of warp 0 start different products",
    "group_other_warp": "warp 2 starts another product than the warps of its warpgroup",
    "group_fewer_products": "for the other warps of their warpgroup to start the same products",
    "group_absent_warp": "for the other warps of their warpgroup to start the same products",
    "group_odd_rows": "aligned to 1024 bytes, or .*32, 64 or 96 bytes behind one, and gets byte 16",
    "group_rows_outside": "wgmma needs 1024 bytes of shared memory",
    "group_no_proxy_fence": "which threads wrote, and none called proxy_fence_shared",
    "group_copy_not_waited": "nobody has waited for the copy_bulk",
    "group_copied_over": "copy_bulk .* writes to byte 512 .* which wgmma in .* reads",
    "group_sums_written": "lane 9 wrote to the accumulators",
}
BAD |= {f"bad_{name}": said for name, said in BAD_SM90.items()}
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
