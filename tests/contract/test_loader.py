"""Finding and loading libvcuda: what is tried, what is refused, and what is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pykestrel import native
from pykestrel.errors import LibraryUnavailable
from pykestrel.native import abi, loader

Python = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.usefixtures("fresh_loader")


def refused(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    monkeypatch.setenv("PYKESTREL_LIB", str(path))
    with pytest.raises(LibraryUnavailable) as caught:
        native.load()
    text = str(caught.value)
    assert "\n" not in text
    assert "PYKESTREL_LIB" in text
    assert str(path) in text
    assert caught.value.exit_code == 3
    assert native.state() == native.State(0, text, library=False, broken=True)
    return text


def test_path_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "no such file" in refused(monkeypatch, tmp_path / "libvcuda.so")


@pytest.mark.skipif(sys.platform == "win32", reason="the loader's words differ")
@pytest.mark.parametrize(
    ("content", "words"),
    [(b"not a library", "too short"), (b"", "too short"), (b"x" * 4096, "invalid ELF header")],
)
def test_corrupt_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "libvcuda.so"
    path.write_bytes(content)
    assert words in refused(monkeypatch, path)


def test_truncated_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_library: Path
) -> None:
    path = tmp_path / "libvcuda.so"
    path.write_bytes(fake_library.read_bytes()[:2000])
    assert "it is cut off: 2000 bytes" in refused(monkeypatch, path)


def test_another_abi_version(
    monkeypatch: pytest.MonkeyPatch, compile_library: Callable[[str], Path]
) -> None:
    # no other symbol: the version is checked before they are looked for
    path = compile_library("int vcuda_abi_version(void) { return 999; }")
    text = refused(monkeypatch, path)
    assert "ABI version is 999" in text
    assert f"needs {abi.ABI_VERSION}" in text


def test_another_library(
    monkeypatch: pytest.MonkeyPatch, compile_library: Callable[[str], Path]
) -> None:
    assert "no vcuda_abi_version" in refused(monkeypatch, compile_library("int x;"))


def test_symbol_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, compile_library: Callable[[str], Path]
) -> None:
    path = compile_library(f"int vcuda_abi_version(void) {{ return {abi.ABI_VERSION}; }}")
    assert "lacks the symbol vcuda_build_info" in refused(monkeypatch, path)


def test_folder_is_searched_for_the_library(
    monkeypatch: pytest.MonkeyPatch, fake_library: Path
) -> None:
    monkeypatch.setenv("PYKESTREL_LIB", str(fake_library.parent))
    assert native.find().path == fake_library
    assert native.build_info()["version"] == "0.0.0-emulated"


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYKESTREL_LIB", raising=False)
    monkeypatch.setattr(loader, "_packaged", lambda name: None)
    result = native.find()
    assert not result.broken
    assert "not installed" in str(result.error)
    with pytest.raises(LibraryUnavailable, match="PYKESTREL_LIB"):
        native.dev_count()


def test_left_out_by_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYKESTREL_LIB", raising=False)
    (tmp_path / "left_out.txt").write_text("CUDA was left out: no nvcc\n", encoding="utf-8")
    monkeypatch.setattr(loader, "_packaged", lambda name: tmp_path / name)
    result = native.find()
    assert (result.error, result.broken) == ("CUDA was left out: no nvcc", False)


def test_the_answer_is_kept(monkeypatch: pytest.MonkeyPatch, fake_library: Path) -> None:
    monkeypatch.setenv("PYKESTREL_LIB", str(fake_library))
    first = native.load()
    monkeypatch.setenv("PYKESTREL_LIB", "nowhere")
    assert native.load() is first


def test_windows_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "LIBRARY_NAME", "vcuda.dll")
    monkeypatch.setenv("PYKESTREL_LIB", str(tmp_path))
    assert loader.candidates() == [tmp_path / "vcuda.dll"]


def test_import_loads_nothing(python: Python) -> None:
    code = """
import sys
import pykestrel
import pykestrel.native
heavy = {"rich", "prompt_toolkit", "jinja2", "tokenizers", "safetensors", "gguf", "huggingface_hub",
         "threadpoolctl"} & set(sys.modules)
assert not heavy, heavy
if sys.platform == "linux":
    assert "vcuda" not in open("/proc/self/maps").read()
from pykestrel.native import loader
assert loader._result is None
"""
    # a library that is not there would be noticed
    python(code, PYKESTREL_LIB="/nonexistent/libvcuda.so")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_import_after_fork(python: Python, fake_library: Path) -> None:
    python(
        """
import os
from pykestrel import native
pid = os.fork()
if pid == 0:
    ok = native.dev_count() == 1
    with native.create(0) as handle:
        native.dev_selftest(handle)
    os._exit(0 if ok else 1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
""",
        PYKESTREL_LIB=str(fake_library),
    )


def test_without_a_driver_every_call_says_why(python: Python, library: Path) -> None:
    """The real library on this machine: it loads, and a missing GPU is a reason, not a crash."""
    done = python(
        """
import ctypes
from pykestrel import native
assert native.abi_version() == native.ABI_VERSION
info = native.build_info()
assert info["abi"] == native.ABI_VERSION and info["archs"] and info["cuda_toolkit"]
if native.dev_count():
    print("has a GPU")
else:
    reason = native.last_error()
    assert reason, "no reason"
    driver, runtime = native.driver_version()
    assert runtime >= 12000
    assert driver or "no NVIDIA driver" in reason, reason
    for call in (lambda: native.dev_query(0), lambda: native.create(0)):
        try:
            call()
        except native.NativeError as e:
            assert e.status == -1 and reason in str(e), (e.status, str(e))
        else:
            raise AssertionError("no error")
    none = native.Handle(native.load())
    for use in (native.dev_selftest, native.prof_read, native.prof_reset):
        try:
            use(none)
        except native.NativeError as e:
            assert e.status == -1 and "NULL" in str(e)
        else:
            raise AssertionError("no error")
    native.destroy(none)
    assert native.state().devices == 0
""",
        PYKESTREL_LIB=str(library),
    )
    assert done.stderr == ""


def test_library_is_here_where_nvcc_is() -> None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        wheel = distribution("pykestrel").read_text("WHEEL") or ""
    except PackageNotFoundError:
        pytest.skip("pykestrel is not installed here, so nothing was built")
    if "Root-Is-Purelib: true" in wheel:
        pytest.skip("pykestrel was installed with PYKESTREL_CUDA=OFF")
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    result = native.find()
    assert result.path is not None, result.error
