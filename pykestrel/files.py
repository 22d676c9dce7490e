"""Cache directories, and files that are either whole or not there.

Everything pykestrel writes goes to a temporary sibling first and is renamed when it is complete,
so that a full disk, Ctrl+C or a crash leaves what was there before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import KestrelError, ModelError


def cache_dir() -> Path:
    """Where pulled models lie: PYKESTREL_CACHE, else the user's cache directory.

    Nothing is created. On Windows the default is ``%LOCALAPPDATA%\\pykestrel``, elsewhere
    ``$XDG_CACHE_HOME/pykestrel`` or ``~/.cache/pykestrel``.
    """
    if own := os.environ.get("PYKESTREL_CACHE"):
        return Path(os.path.expanduser(own))
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "pykestrel"
    # The XDG specification says that a relative path here is to be ignored.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else _home() / ".cache") / "pykestrel"


def hub_cache_dir() -> Path:
    """The Hugging Face hub cache: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    if own := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expanduser(own))
    if home := os.environ.get("HF_HOME"):
        return Path(os.path.expanduser(home)) / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(os.path.expanduser(base)) if base else _home() / ".cache") / "huggingface" / "hub"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise KestrelError(
            "the home directory cannot be found; set PYKESTREL_CACHE to a directory to keep models"
        ) from None


def make_cache_dir(*parts: str) -> Path:
    """`cache_dir` joined with ``parts``, created; KestrelError when it cannot be written."""
    path = cache_dir().joinpath(*parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KestrelError(
            f"the cache directory {path} cannot be made ({reason(error)}); "
            "set PYKESTREL_CACHE to a directory that can be written"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise KestrelError(
            f"the cache directory {path} cannot be written (permission denied); "
            "set PYKESTREL_CACHE to a directory that can be written"
        )
    return path


def reason(error: OSError) -> str:
    """The operating system's own words, in the middle of a sentence."""
    words = error.strerror or str(error) or type(error).__name__
    return words[:1].lower() + words[1:]


def write_error(path: Path, error: OSError) -> KestrelError:
    """The one line for a write to ``path`` that failed with ``error``."""
    hint = "choose another place, or change its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            return KestrelError(
                f"{path} cannot be written: {reason(error)} ({free / 1e6:.1f} MB free); make room "
                "or choose another place; nothing was left behind"
            )
        hint = "make room, or choose another place"
    return KestrelError(f"{path} cannot be written: {reason(error)}; {hint}")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears at ``path`` whole, or not at all.

    It is written under a temporary name beside ``path``, flushed to the disk, then renamed over
    what was there. Any exception (Ctrl+C too) removes it; an OSError of the writing becomes a
    KestrelError that names ``path``.
    """
    temporary: Path | None = None
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it private to the user
        os.replace(temporary, path)
        temporary = None
        _sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def atomic_dir(path: Path, *, force: bool = False, flush: bool = True) -> Iterator[Path]:
    """A directory that appears at ``path`` whole, or not at all.

    Yields an empty temporary sibling to fill. ``path`` must not be there already, except as an
    empty directory; with ``force`` a directory there is replaced once the new one is complete.
    Without ``flush`` its files need not be on the disk yet.
    """
    _refuse_target(path, force)
    temporary: Path | None = None
    made = [p for p in path.absolute().parents if not p.exists()]  # the innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _sibling(path, ".tmp")
        os.chmod(temporary, 0o777 & ~_umask())
        yield temporary
        for file in temporary.rglob("*"):
            if flush and file.is_file():
                sync_file(file)
        _refuse_target(path, force)  # it may have appeared in the meantime
        old = None
        if path.exists():
            old = _sibling(path, ".old")
            os.replace(path, old / "old")
        try:
            os.replace(temporary, path)
        except BaseException:
            if old is not None:
                os.replace(old / "old", path)
                old.rmdir()
            raise
        temporary = None
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _sibling(path: Path, suffix: str) -> Path:
    """A new hidden directory beside ``path``: a rename to ``path`` stays on one file system."""
    return Path(tempfile.mkdtemp(prefix=f".{path.name[:80]}.", suffix=suffix, dir=path.parent))


def _refuse_target(path: Path, force: bool) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ModelError(f"{path} is there already and is not a directory; choose another name")
    if path.is_dir() and not force and any(path.iterdir()):
        raise ModelError(
            f"{path} is there already; choose another name, or replace it with --force"
        )


def sync_file(path: Path) -> None:
    """Have the bytes of ``path`` on the disk: a full disk may show only now."""
    # Windows can only flush a handle that may write.
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
