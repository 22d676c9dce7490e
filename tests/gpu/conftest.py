"""Tests of the device: on a GPU where there is one, else on the emulated CUDA runtime.

The same test bodies run on both. What steers faults (`fake`) exists on the emulated one only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import native_build
import pytest
from fake_cuda import Counter, FakeCuda

from pykestrel import native


@dataclass(frozen=True)
class CudaLib:
    """The library that the tests run on."""

    fake: FakeCuda | None  # None: a real GPU


@pytest.fixture(scope="session")
def emulated() -> Path:
    """libvcuda on the emulated runtime."""
    if native_build.compiler() is None:
        pytest.skip("needs a GPU, or g++ on Linux for the emulated one")
    return native_build.emulated_library()


@pytest.fixture(scope="session")
def real_gpu() -> bool:
    """Whether a GPU is there and the installed library can use it."""
    return native.state().devices > 0


@pytest.fixture
def cuda_lib(
    real_gpu: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    fresh_loader: None,
) -> Iterator[CudaLib]:
    """pykestrel.native on a library with a device."""
    if real_gpu:
        yield CudaLib(None)
        return
    path = request.getfixturevalue("emulated")
    monkeypatch.setenv("PYKESTREL_LIB", str(path))
    fake = FakeCuda(path)
    fake.reset()
    yield CudaLib(fake)
    fake.reset()


@pytest.fixture
def fake(cuda_lib: CudaLib) -> FakeCuda:
    """The controls of the emulated device."""
    if cuda_lib.fake is None:
        pytest.skip("faults can be asked of the emulated device only")
    return cuda_lib.fake


@pytest.fixture(autouse=True)
def what_comes_back_was_written(request: pytest.FixtureRequest) -> Iterator[None]:
    """No copy to the host brings words that nobody has written: compute-sanitizer's initcheck, on
    the emulated device. Four codes of -1 would count: where those come back (test_weights.py)
    this is not looked at."""
    if "cuda_lib" not in request.fixturenames:
        yield
        return
    lib: CudaLib = request.getfixturevalue("cuda_lib")
    before = 0 if lib.fake is None else lib.fake.count(Counter.FRESH)
    yield
    if lib.fake is not None:
        after = lib.fake.count(Counter.FRESH)
        assert after in (0, before)  # 0: the counters were reset


@pytest.fixture
def handle(cuda_lib: CudaLib) -> Iterator[native.Handle]:
    with native.create(0) as opened:
        yield opened


@pytest.fixture
def nothing_left(cuda_lib: CudaLib) -> Iterator[Callable[[], None]]:
    """At the end of the test the device holds what it held at its start."""
    before = 0 if cuda_lib.fake is None else cuda_lib.fake.memory_used

    def check() -> None:
        if cuda_lib.fake is not None:
            assert cuda_lib.fake.memory_used == before

    yield check
    check()
