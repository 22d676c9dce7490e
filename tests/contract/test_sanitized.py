"""The emulated library under AddressSanitizer and UBSan: host code and kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import native_build
import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_under_the_sanitizers() -> None:
    """Tests that run everything, once more in a process that has the sanitizers preloaded.

    They find reads and writes outside an allocation, host code that touches device memory, and
    kernels that read before pdl_wait what an earlier kernel may still be writing.
    """
    if native_build.compiler() is None:
        pytest.skip("needs g++ on Linux")
    native_build.emulated_library(sanitize=True)
    chosen = "nothing_depends_on_the_order or each_weight or pieces or budget or selftest"
    env = {**os.environ, **native_build.sanitized_environment(), "VCUDA_SANITIZE": "1"}
    names = ("faults", "segment_faults", "cache_faults", "product_faults", "native")
    tests = [HERE / f"test_{name}.py" for name in names]
    done = subprocess.run(
        # -s: pytest would keep what a sanitizer writes before it ends the process
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-s",
            "-p",
            "no:cacheprovider",
            "-k",
            chosen,
            *tests,
        ],
        cwd=HERE.parent.parent,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout
