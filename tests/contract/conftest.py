"""Tools of the contract tests: compilers, small libraries, commands in a clean process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NATIVE = ROOT / "native"


def run(command: list[object], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and keep its output as text."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [str(c) for c in command],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        **options,
    )


def _compiler(*names: str) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    pytest.skip(f"needs a compiler ({' or '.join(names)})")


@pytest.fixture(scope="session")
def cc() -> str:
    return _compiler("cc", "gcc", "clang")


@pytest.fixture(scope="session")
def cxx() -> str:
    return _compiler("c++", "g++", "clang++")


@pytest.fixture(scope="session")
def library() -> Path:
    """The built libvcuda. Skips where the package was built without it."""
    from pykestrel import native

    found = native.find()
    if found.path is None:
        pytest.skip(f"needs the native library: {found.error}")
    return found.path


@pytest.fixture(scope="session")
def fake_library(cxx: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libvcuda with native/tests/fake_device.cpp in the place of CUDA."""
    path = tmp_path_factory.mktemp("fake") / "libvcuda.so"
    values = {
        "VCUDA_VERSION": "0.0.0-fake",
        "VCUDA_ARCHS": "none",
        "VCUDA_TOOLKIT": "none",
        "VCUDA_HOST_COMPILER": "any",
        "VCUDA_BUILD_TYPE": "Debug",
    }
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fvisibility=hidden"]
    done = run(
        [cxx, *flags, "-shared", "-fPIC", "-DVCUDA_BUILDING"]
        + [f'-D{key}="{value}"' for key, value in values.items()]
        + ["-I", NATIVE / "include", "-I", NATIVE / "src"]
        + [NATIVE / "src/api.cpp", NATIVE / "src/error.cpp", NATIVE / "tests/fake_device.cpp"]
        + ["-pthread", "-o", path]
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def compile_library(cc: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compile a few lines of C into a shared library."""

    def build(source: str) -> Path:
        folder = tmp_path_factory.mktemp("lib")
        (folder / "lib.c").write_text(source, encoding="utf-8")
        done = run([cc, "-shared", "-fPIC", folder / "lib.c", "-o", folder / "libvcuda.so"])
        assert done.returncode == 0, done.stderr
        return folder / "libvcuda.so"

    return build


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a few lines of Python in a process of their own, with extra environment variables."""

    def call(code: str, **env: str) -> subprocess.CompletedProcess[str]:
        done = run([sys.executable, "-W", "ignore", "-c", code], env={**os.environ, **env})
        assert done.returncode == 0, done.stderr
        return done

    return call
