"""Single kernels on the emulated device against a plain reference: C++ programs that compare many
shapes and end with 1 at a difference (native/tests/kernels_*.cpp)."""

from __future__ import annotations

import subprocess

import native_build
import pytest

PROGRAMS = {
    "attention": ["native/tests/kernels_attention.cpp", "native/kernels/attention.cu"],
    "moe_rows": ["native/tests/kernels_moe_rows.cpp", "native/kernels/moe_rows.cu"],
    "rows": ["native/tests/kernels_rows.cpp", "native/kernels/operand_rows.cu"],
    "gemm": [
        "native/tests/kernels_gemm.cpp",
        *("native/kernels/gemm.cu", "native/kernels/gemm_mma.cu", "native/kernels/gemm_wgmma.cu"),
        "native/kernels/pack.cu",
    ],
    "flash": [
        "native/tests/kernels_flash.cpp",
        *(f"native/kernels/{name}.cu" for name in ("flash", "flash_wgmma", "kv_rows", "attention")),
    ],
    "sample": ["native/tests/kernels_sample.cpp", "native/kernels/sample.cu"],
}


def run(name: str, sanitize: bool) -> None:
    if native_build.compiler() is None:
        pytest.skip("needs g++")
    program = native_build.build_program(PROGRAMS[name], sanitize)
    env = native_build.sanitized_environment() if sanitize else {}
    env.pop("LD_PRELOAD", None)  # the program itself is linked with the sanitizers
    done = subprocess.run([program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_agree_with_the_reference(name: str) -> None:
    run(name, sanitize=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_stay_inside_their_memory(name: str) -> None:
    run(name, sanitize=True)
