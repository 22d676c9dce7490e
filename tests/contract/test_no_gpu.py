"""The library as it is built, on a machine without a GPU: every call says that it did nothing, and
why, and the program goes on without it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from pykestrel.native import abi

from .conftest import ROOT

# What needs no device: it answers 0 to good arguments, also here.
NEEDS_NONE = {"vcuda_dev_count", "vcuda_driver_version", "vcuda_destroy"}
NO_STATUS = {"vcuda_abi_version", "vcuda_build_info", "vcuda_last_error", "vcuda_wkey"}
TINY = ROOT / "tests/golden/data/qwen3-tied"


@pytest.fixture(scope="module")
def raw(library: Path) -> ctypes.CDLL:
    """The built library, bound but without the checks of pykestrel.native."""
    loaded = ctypes.CDLL(str(library))
    for name, restype, argtypes in abi.PROTOTYPES:
        function = getattr(loaded, name)
        function.restype, function.argtypes = restype, list(argtypes)
    count = ctypes.c_int32(7)
    assert loaded.vcuda_dev_count(ctypes.byref(count)) == 0
    if count.value:
        pytest.skip("there is a GPU here")
    return loaded


def reason(raw: ctypes.CDLL) -> str:
    return bytes(raw.vcuda_last_error()).decode()


def test_no_device_is_counted_and_none_is_taken(raw: ctypes.CDLL) -> None:
    handle = ctypes.c_void_p(1)
    assert raw.vcuda_create(0, ctypes.byref(handle)) == -1
    assert handle.value is None
    assert "NVIDIA driver" in reason(raw)
    info = abi.DeviceInfoStruct(struct_size=ctypes.sizeof(abi.DeviceInfoStruct))
    assert raw.vcuda_dev_query(0, ctypes.byref(info)) == -1
    assert "NVIDIA driver" in reason(raw)


@pytest.mark.parametrize("name", [name for name, *_ in abi.PROTOTYPES])
def test_every_call_answers_that_it_did_nothing(raw: ctypes.CDLL, name: str) -> None:
    if name in NO_STATUS | NEEDS_NONE:
        return
    function = getattr(raw, name)
    nothing = [0 if kind in _NUMBERS else None for kind in function.argtypes]
    raw.vcuda_create(0, None)  # leaves a reason of its own behind
    before = reason(raw)
    assert function(*nothing) == -1
    assert reason(raw)
    assert reason(raw) != before or name == "vcuda_create"


_NUMBERS = {ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int}


def test_the_program_says_so_or_goes_on(
    raw: ctypes.CDLL, library: Path, python: Callable[..., CompletedProcess[str]]
) -> None:
    code = """
import subprocess, sys
run = [sys.executable, "-m", "pykestrel", "run", "-m", sys.argv[1], "--prompt-ids", "1,2,3"]
for flags in (["--cuda"], ["--device", "auto"]):
    done = subprocess.run([*run, "-n", "4", "--temp", "0", "--json", *flags],
                          capture_output=True, text=True)
    print(done.returncode, "Traceback" in done.stderr, "NVIDIA driver" in done.stderr,
          '"tokens"' in done.stdout)
"""
    done = python(f"import sys; sys.argv.append({str(TINY)!r})\n{code}", PYKESTREL_LIB=str(library))
    assert done.stdout.splitlines() == ["3 False True False", "0 False False True"]
