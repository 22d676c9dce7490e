"""What a model name means: a directory, a .gguf file, or a hub name in the local cache."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..files import hub_cache_dir, reason
from .jsonfile import MAX_CONFIG, is_lfs_pointer, lfs_error, read_bytes, read_json, read_text, shown

if TYPE_CHECKING:
    from .gguf_file import GGUFFile

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?")


@dataclass(frozen=True)
class Source:
    """A model that is there: its files can be read."""

    kind: str  # "dir" | "gguf"
    path: Path  # the directory, or the .gguf file
    name: str  # as the user would call it, for display

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the directory; None when the file is not there (or for a GGUF)."""
        path = self.path / name
        if self.kind != "dir" or not os.path.lexists(path):
            return None
        value = read_json(path, MAX_CONFIG if name.endswith("config.json") else 1 << 28)
        if not isinstance(value, dict):
            raise ModelError(f"{path} must hold a JSON object")
        return value

    def read_text(self, name: str) -> str | None:
        """A UTF-8 text file of the directory; None when it is not there (or for a GGUF)."""
        path = self.path / name
        if self.kind != "dir" or not os.path.lexists(path):
            return None
        return read_text(path)

    def gguf(self) -> GGUFFile:
        """The opened GGUF file: `.metadata` (a mapping) and `.tensors`; opened once."""
        if self.kind != "gguf":
            raise ModelError(f"{self.path} is a directory, not a GGUF file")
        return self._gguf

    @cached_property
    def _gguf(self) -> GGUFFile:
        from .gguf_file import GGUFFile

        return GGUFFile(self.path)


def resolve_model(name: str | Path) -> Source:
    """Find a model; ModelError says where it was looked for and how to get it.

    In this order: a directory or file of that name, a name of `pykestrel.pull.CATALOG` that was
    pulled, a hub name ``org/name`` (or ``org/name@revision``) in the local hub cache. Nothing is
    downloaded.
    """
    text = str(name)
    if not text or "\0" in text:
        raise ModelError("the name of the model is empty; name a directory or a .gguf file")
    path = Path(os.path.expanduser(text))
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"{shown(text, 200)} cannot be read: {reason(error)}") from None
    if is_dir:
        return _directory(path, text)
    if is_file:
        return _file(path, text)
    if isinstance(name, str) and text.lower() in _catalog():
        return _pulled(text.lower())
    if isinstance(name, str) and HUB_NAME.fullmatch(text) and not text.endswith(".gguf"):
        return _hub(text)
    raise ModelError(
        f"there is no model {shown(text, 200)}: no such directory or .gguf file, no name of "
        f"`pykestrel pull` ({', '.join(_catalog())}) and no hub name (org/name)"
    )


def _directory(path: Path, name: str) -> Source:
    if os.path.lexists(path / "config.json"):
        return Source("dir", path, name)
    try:
        ggufs = sorted(p.name for p in path.iterdir() if p.suffix == ".gguf")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {reason(error)}") from None
    if len(ggufs) == 1:
        return Source("gguf", path / ggufs[0], name)
    if ggufs:
        raise ModelError(
            f"{path} holds {len(ggufs)} .gguf files; name one of them, for example "
            f"{path / ggufs[0]}"
        )
    if os.path.lexists(path / "adapter_config.json"):
        raise ModelError(
            f"{path} holds an adapter (LoRA), not a model; merge it into its base model first"
        )
    raise ModelError(f"{path} has no config.json; name the directory that holds the model's files")


def _file(path: Path, name: str) -> Source:
    if path.suffix.lower() == ".gguf":
        return Source("gguf", path, name)
    if path.name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        return _directory(path.parent, str(path.parent))
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {reason(error)}") from None
    if head[:4] == b"GGUF":
        return Source("gguf", path, name)
    if is_lfs_pointer(head):
        raise lfs_error(path)
    raise ModelError(f"{path} is no .gguf file; name a model directory or a .gguf file")


def _catalog() -> tuple[str, ...]:
    from ..pull import CATALOG

    return tuple(CATALOG)


def _pulled(name: str) -> Source:
    from ..pull import pulled_path

    path = pulled_path(name)
    if path is None:
        raise ModelError(f"{name} has not been fetched yet; get it with `pykestrel pull {name}`")
    return Source("gguf", path, name)


def _hub(name: str) -> Source:
    """A snapshot of the hub cache: models--org--name/snapshots/<commit>, found through refs/."""
    repo, _, revision = name.partition("@")
    cache = hub_cache_dir()
    base = cache / f"models--{repo.replace('/', '--')}"
    pull = f"get it with `pykestrel pull {name}`"
    if not base.is_dir():
        raise ModelError(
            f"there is no directory {name}, and the hub cache {cache} does not hold {repo}; {pull}"
        )
    revision = revision or "main"
    snapshots = base / "snapshots"
    if ".." in revision.split("/"):
        raise ModelError(f"{shown(revision)} is no revision of {repo}")
    ref = base / "refs" / revision
    commit = revision
    if ref.is_file():
        commit = read_bytes(ref, 4096).decode("ascii", "replace").strip()
    if re.fullmatch(r"[\w.-]+", commit) and (snapshots / commit).is_dir() and commit != "..":
        source = _directory(snapshots / commit, name)
        return Source(source.kind, source.path, name)
    raise ModelError(
        f"the hub cache {cache} holds {repo} but not its revision {shown(revision)}; {pull}"
    )
