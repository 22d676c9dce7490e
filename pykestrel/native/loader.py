"""Find libvcuda and load it: once, on first use, under a lock. Importing this loads nothing.

``PYKESTREL_LIB`` names the library's path and then nothing else is tried; otherwise it is looked
for in the installed package (``pykestrel/_lib``). A library of another ABI version is refused
before any of its other symbols is touched.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import os
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LibraryUnavailable, NativeError
from . import abi

ENV = "PYKESTREL_LIB"
LIBRARY_NAME = "vcuda.dll" if sys.platform == "win32" else "libvcuda.so"


@dataclass(frozen=True)
class Attempt:
    """One path that was tried, and what came of it in the loader's own words."""

    path: Path
    outcome: str  # "loaded", "no such file", or why it could not be loaded
    exists: bool


@dataclass(frozen=True)
class LoadResult:
    """What became of looking for the library."""

    library: ctypes.CDLL | None
    path: Path | None  # of the library that was loaded
    attempts: tuple[Attempt, ...]
    error: str | None = None  # one sentence, when there is no library
    broken: bool = False  # a library is there, or was named, and cannot be used
    left_out: str | None = None  # why the build left the library out, when it did
    keep: tuple[Any, ...] = field(default=(), repr=False)  # what must live as long as the library


_lock = threading.Lock()
_result: LoadResult | None = None


def _packaged(name: str) -> Path | None:
    """A file of ``pykestrel/_lib``, or None.

    importlib.resources and not ``__file__``: in an editable install the sources lie in the work
    tree and the library in site-packages.
    """
    try:
        found = importlib.resources.files("pykestrel") / "_lib" / name
        return found if isinstance(found, Path) else None
    except (ModuleNotFoundError, FileNotFoundError, TypeError):
        return None


def candidates() -> list[Path]:
    """The paths to try, in order; one only when PYKESTREL_LIB is set."""
    named = os.environ.get(ENV)
    if named:
        path = Path(named).expanduser()
        return [path / LIBRARY_NAME if path.is_dir() else path]
    packaged = _packaged(LIBRARY_NAME)
    return [packaged] if packaged is not None else []


def left_out_reason() -> str | None:
    """Why the build left the library out, as the build wrote it down; None when it did not."""
    note = _packaged("left_out.txt")
    try:
        text = note.read_text(encoding="utf-8").strip() if note is not None else ""
    except OSError:
        return None
    return text or None


def _refuse_cut_off(path: Path) -> None:
    """Raise LibraryUnavailable for an ELF file shorter than it says: dlopen would die of SIGBUS."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":  # 64 bit, little endian
        return  # another kind of file: the loader's own words
    (sections_at,) = struct.unpack_from("<Q", head, 40)
    entry, count = struct.unpack_from("<HH", head, 58)
    if sections_at + entry * count > size:
        raise LibraryUnavailable(
            f"it is cut off: {size} bytes are there of {sections_at + entry * count}; "
            "install it again"
        )


def _open(path: Path) -> tuple[ctypes.CDLL, tuple[Any, ...]]:
    """Load one file and check its ABI version. Raises OSError, or LibraryUnavailable."""
    _refuse_cut_off(path)
    keep: tuple[Any, ...] = ()
    if sys.platform == "win32":
        keep = (os.add_dll_directory(str(path.parent.resolve())),)
    library = ctypes.CDLL(str(path.resolve()))  # absolute: never a search along the system's path
    try:
        version = int(abi.bind(library, "vcuda_abi_version")())
    except AttributeError:
        raise LibraryUnavailable(
            "it has no vcuda_abi_version: not pykestrel's library; name the right one"
        ) from None
    if version != abi.ABI_VERSION:
        raise LibraryUnavailable(
            f"its ABI version is {version} and this pykestrel needs {abi.ABI_VERSION}; "
            "install the library and the package from the same version"
        )
    for name, _, _ in abi.PROTOTYPES:
        try:
            function = abi.bind(library, name)
        except AttributeError:
            raise LibraryUnavailable(f"it lacks the symbol {name}; install it again") from None
        if function.restype is ctypes.c_int and name not in abi.NO_STATUS:
            function.errcheck = _status_check(library)
    return library, keep


def _status_check(library: ctypes.CDLL) -> Callable[[int, Any, Any], int]:
    """errcheck of a status: runs on the calling thread, so that thread's sentence is there."""

    def check(status: int, function: Any, _arguments: Any) -> int:
        if status == abi.OK:
            return status
        text = (library.vcuda_last_error() or b"").decode("utf-8", "replace")
        raise NativeError(f"{function.__name__}: {text or 'no reason was given'}", status)

    return check


def _search() -> LoadResult:
    attempts: list[Attempt] = []
    for path in candidates():
        if not path.is_file():
            attempts.append(Attempt(path, "no such file", exists=False))
            continue
        try:
            library, keep = _open(path)
        except OSError as e:
            attempts.append(Attempt(path, str(e), exists=True))
        except LibraryUnavailable as e:
            attempts.append(Attempt(path, str(e), exists=True))
        else:
            attempts.append(Attempt(path, "loaded", exists=True))
            return LoadResult(library, path, tuple(attempts), keep=keep)

    named = bool(os.environ.get(ENV))
    left_out = None if named else left_out_reason()
    broken = named or any(a.exists for a in attempts)
    tried = "; ".join(f"{a.path}: {a.outcome}" for a in attempts)
    if named:
        error = f"{ENV} names a library that cannot be used ({tried})"
    elif broken:
        error = f"the CUDA library could not be loaded ({tried})"
    elif left_out:
        error = left_out
    else:
        where = tried or "the installed package has no pykestrel/_lib"
        error = (
            f"the CUDA library is not installed ({where}); install the CUDA toolkit and then "
            f"pykestrel again, or set {ENV} to its path"
        )
    return LoadResult(None, None, tuple(attempts), error, broken, left_out)


def find() -> LoadResult:
    """Look for the library once and keep the answer; a library that is not there is an answer."""
    global _result
    with _lock:
        if _result is None:
            _result = _search()
        return _result


def load() -> ctypes.CDLL:
    """The loaded library. Raises LibraryUnavailable with every path tried."""
    result = find()
    if result.library is None:
        raise LibraryUnavailable(result.error or "the CUDA library is not there")
    return result.library


def forget() -> None:
    """Look again on the next use (a test, or a program that has just set PYKESTREL_LIB)."""
    global _result
    with _lock:
        _result = None
