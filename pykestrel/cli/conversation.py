"""What the REPL keeps: settings by name, and conversations as JSON files."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import KestrelError, UsageError
from .flags import SAMPLING, THINKING
from .options import Option, close_to
from .terminal import read_text_file

Message: TypeAlias = "dict[str, str]"

SETTINGS: dict[str, Option] = {option.dest: option for option in (*SAMPLING, *THINKING)}


def find_setting(word: str) -> Option:
    """The setting of a name or alias as on the command line: temperature, temp, max-tokens, n."""
    wanted = word.lstrip("-").replace("_", "-")
    for option in SETTINGS.values():
        if wanted in [flag.lstrip("-") for flag in option.flags]:
            return option
    raise UsageError(f"unknown setting {word!r}{close_to(word, SETTINGS)}; /set lists them")


def sampling_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are sampling values."""
    thinking = {option.dest for option in THINKING}
    return {name: value for name, value in settings.items() if name not in thinking}


def file_argument(rest: str, command: str) -> Path:
    if not rest:
        raise UsageError(f"{command} needs a file name")
    return Path(rest).expanduser()


class Settings:
    """The settings of a REPL, each with where it comes from.

    What the user chose in this session (a flag, a variable, /set) wins over what a file brought,
    whichever came first.
    """

    def __init__(self, args: Namespace) -> None:
        self._chosen: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._origin: dict[str, str] = {}
        for name, option in SETTINGS.items():
            value = getattr(args, name, None)
            if value is not None:
                self._chosen[name] = value
                self._origin[name] = option.flag if name in args.given else option.env

    @property
    def values(self) -> dict[str, Any]:
        """What holds, by name; the rest is the model's and the defaults' affair."""
        both = {**self._loaded, **self._chosen}
        return {name: both[name] for name in SETTINGS if name in both}

    def origin(self, name: str) -> str | None:
        """Where the value of a setting comes from; None: nobody chose it."""
        if name in self._chosen:
            return self._origin[name]
        return "/load" if name in self._loaded else None

    def choose(self, name: str, value: Any) -> None:
        self._chosen[name], self._origin[name] = value, "/set"

    def reset(self, name: str) -> None:
        self._chosen.pop(name, None)
        self._loaded.pop(name, None)

    def with_loaded(self, values: dict[str, Any]) -> dict[str, Any]:
        """What `values` would be after `load`."""
        return {**values, **self._chosen}

    def load(self, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Take a file's settings over those of an earlier file; returns those that hold now, and
        the names of those that this session's own choice beats."""
        self._loaded = dict(values)
        taken = {name: v for name, v in values.items() if name not in self._chosen}
        beaten = [n for n, v in values.items() if n in self._chosen and self._chosen[n] != v]
        return taken, beaten


@dataclass(frozen=True)
class Conversation:
    """A saved conversation: ``{"model", "system", "settings", "messages"}``."""

    model: str
    system: str | None
    settings: dict[str, Any]
    messages: list[Message]

    def save(self, path: Path) -> None:
        """Write it whole or not at all; a file that is there is replaced."""
        from .. import __version__
        from ..files import atomic_write

        content = {"pykestrel": __version__, **self.__dict__}
        with atomic_write(path) as file:
            file.write(json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read and check a file; KestrelError says what is wrong with it."""
        try:
            content = json.loads(read_text_file(str(path)))
        except (ValueError, RecursionError):
            raise KestrelError(f"{path} is not a conversation: it is not JSON") from None
        if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
            raise KestrelError(f"{path} is not a conversation: it has no list of messages")
        system = content.get("system")
        if system is not None and not isinstance(system, str):
            raise KestrelError(f"{path} is not a conversation: its system message is no text")
        settings = content.get("settings", {})
        if not isinstance(settings, dict):
            raise KestrelError(f"{path} is not a conversation: its settings are no object")
        return cls(
            model=str(content.get("model", "an unnamed model")),
            system=system,
            settings={find_setting(k).dest: _setting(k, v) for k, v in settings.items()},
            messages=[_message(path, i, m) for i, m in enumerate(content["messages"])],
        )


def _message(path: Path, index: int, message: object) -> Message:
    fields = ("role", "content", "reasoning_content")
    if (
        not isinstance(message, dict)
        or message.get("role") not in ("user", "assistant")
        or not isinstance(message.get("content"), str)
        or not all(name in fields and isinstance(value, str) for name, value in message.items())
    ):
        raise KestrelError(
            f"{path} is not a conversation: message {index} must have a role (user or assistant) "
            "and a content text"
        )
    return dict(message)


def _setting(name: str, value: object) -> Any:
    """A setting as JSON holds it, through the parser of its flag."""
    option = find_setting(name)
    if option.parse is None:
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false, got {value!r}")
        return value
    if option.many and isinstance(value, list):
        return [option.read(str(item), name) for item in value]
    if isinstance(value, list):
        return option.read(",".join(map(str, value)), name)
    return option.read(json.dumps(value) if isinstance(value, dict) else str(value), name)
