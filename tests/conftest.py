"""What every test shares: a clean environment, the demo model, the native library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")

# Two busy cores make any deadline a coin toss; CI draws the same examples every time.
settings.register_profile(
    "pykestrel",
    deadline=None,
    derandomize=IN_CI,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pykestrel")


def pytest_configure(config: pytest.Config) -> None:
    # Every flag can be set through the environment: a test must not depend on the caller's.
    for key in list(os.environ):
        if key.startswith("PYKESTREL_") and key not in ("PYKESTREL_CACHE", "PYKESTREL_LIB"):
            del os.environ[key]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    from pykestrel import native

    state = native.state()
    if state.devices == 0:
        skip = pytest.mark.skip(reason=f"needs a GPU: {state.reason}")
        for item in gpu:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's file in the cache (PYKESTREL_CACHE, or the user's), fetched once.

    Where it cannot be fetched the tests that need it are skipped, except in CI, where they fail.
    """
    from pykestrel import pull
    from pykestrel.errors import KestrelError

    have = pull.demo_path()
    if have is not None:
        return have
    try:
        return pull.pull(pull.DEMO)
    except KestrelError as e:
        if IN_CI:
            raise
        pytest.skip(f"the demo model cannot be fetched: {e}")


@pytest.fixture
def fresh_loader() -> Iterator[None]:
    """Let a test change PYKESTREL_LIB: the library is looked for anew in it, and after it."""
    from pykestrel.native import loader

    loader.forget()
    yield
    loader.forget()
