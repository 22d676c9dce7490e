"""JSON files of strangers: read within bounds, or refused in one sentence."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ModelError
from ..files import reason

MAX_JSON = 256 << 20  # bytes; the largest tokenizer.json in the wild are some 35 MB
MAX_CONFIG = 8 << 20  # bytes; a config.json has a few thousand

# Git LFS replaces a file that was not fetched by some 130 bytes of text that begin so.
_LFS_HEAD = b"version https://git-lfs"


def shown(value: object, limit: int = 60) -> str:
    """``value`` in ASCII, quoted and cut, so that it can stand in any one-line message."""
    try:
        text = ascii(value if not isinstance(value, (str, bytes)) else value[: limit + 1])
    except (RecursionError, ValueError):  # deep nesting; an int of more digits than str() allows
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit + 2 else text[: limit - 1] + "..."


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a Git LFS pointer instead of the data."""
    return head.startswith(_LFS_HEAD)


def lfs_error(path: Path) -> ModelError:
    return ModelError(
        f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`, or "
        "download the file again"
    )


def open_checked(path: Path) -> tuple[int, int]:
    """A file descriptor to read and the size of a regular file; ModelError otherwise.

    A FIFO or device would block or never end, so anything but a regular file is refused.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download the model again") from None
    except (OSError, ValueError) as error:
        words = reason(error) if isinstance(error, OSError) else str(error)
        raise ModelError(f"{shown(str(path), 200)} cannot be read: {words}") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise ModelError(f"{path} is not a regular file; a model file was wanted")
    return fd, info.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole file, at most ``limit`` bytes."""
    fd, size = open_checked(path)
    with os.fdopen(fd, "rb") as file:
        if size > limit:
            raise ModelError(
                f"{path} has {size} bytes, but such a file has at most {limit}; it is not what its "
                "name says"
            )
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {reason(error)}") from None
    if is_lfs_pointer(data):
        raise lfs_error(path)
    return data


def read_text(path: Path, limit: int = MAX_JSON) -> str:
    """A UTF-8 text file, with or without a byte order mark."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); download it again"
        ) from None


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """What a JSON file holds. A key given twice, NaN and Infinity are refused."""
    text = read_text(path, limit)
    if not text.strip():
        raise ModelError(f"{path} is empty; download it again")
    return parse_json(text, str(path))


def read_json_object(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """`read_json` of a file whose top level must be an object."""
    value = read_json(path, limit)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {kind_of(value)}; an object was wanted")
    return value


def kind_of(value: object) -> str:
    """The JSON name of the type of ``value``."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def parse_json(text: str, where: str) -> Any:
    """Strict JSON; every fault is a ModelError that names ``where``."""

    def constant(name: str) -> NoReturn:
        raise ModelError(f"{where} holds {name}, which is no JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ModelError(f"{where} gives the key {shown(key)} twice")
                seen.add(key)
        return result

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{where} is not valid JSON (line {error.lineno}, column {error.colno}: "
            f"{error.msg}); download it again"
        ) from None
    except RecursionError:
        raise ModelError(f"{where} is nested too deeply to be what its name says") from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise ModelError(f"{where} holds a number that cannot be read: {error}") from None
