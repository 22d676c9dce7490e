"""Tools of the contract tests: compilers, small libraries, commands in a clean process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import native_build
import pytest
from fake_cuda import FakeCuda

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
def fake_library() -> Path:
    """libvcuda on the emulated CUDA runtime (native/tests/emu): kernels run on the CPU."""
    if native_build.compiler() is None:
        pytest.skip("needs g++ on Linux")
    return native_build.emulated_library()


@pytest.fixture
def fake_cuda(
    fake_library: Path, monkeypatch: pytest.MonkeyPatch, fresh_loader: None
) -> Iterator[FakeCuda]:
    """pykestrel.native on the emulated library, and that library's controls, all at default."""
    monkeypatch.setenv("PYKESTREL_LIB", str(fake_library))
    fake = FakeCuda(fake_library)
    fake.reset()
    yield fake
    fake.reset()


@pytest.fixture
def clean_device(fake_cuda: FakeCuda) -> Iterator[None]:
    """The test must give back everything that it takes on the device."""
    assert fake_cuda.live == 0, "an earlier test left something on the device"
    yield
    assert fake_cuda.live == 0, "the test left something on the device"


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
