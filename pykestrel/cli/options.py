"""Flags as data: one `Option` gives the argparse argument, its PYKESTREL_ variable and its help.

A value comes from the flag, else from the environment, else is None: what follows then (a model's
generation_config, a built-in default) is the command's affair. Both sources go through the same
parser, and an error names the one that was used.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import UsageError
from ..units import parse_bytes, parse_count

Parse = Callable[[str, str], Any]  # (text, name of the flag or variable) -> value

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


# -- parsers of one value -------------------------------------------------------------------------


def text(value: str, name: str) -> str:
    """Text as UTF-8, also where Python took the command line for ASCII (LC_ALL=C)."""
    try:
        return value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise UsageError(f"{name} is not valid UTF-8 text: {value!r}") from None


def count(value: str, name: str) -> int:
    return parse_count(value, name)


def size(value: str, name: str) -> int:
    return parse_bytes(value, name)


def whole(value: str, name: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, got {value!r}") from None


def real(value: str, name: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{name} must be a number, got {value!r}") from None


def truth(value: str, name: str) -> bool:
    word = value.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise UsageError(f"{name} must be 1 or 0 (true, false, yes, no, on, off), got {value!r}")


def one_of(*allowed: str) -> Parse:
    def parse(value: str, name: str) -> str:
        if value not in allowed:
            raise UsageError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        return value

    return parse


def listed(parse: Parse) -> Parse:
    """A list with commas: ``128,512``."""

    def parse_list(value: str, name: str) -> list[Any]:
        items = [item.strip() for item in value.split(",")]
        if not all(items):
            raise UsageError(f"{name} must be values with commas between them, got {value!r}")
        return [parse(item, name) for item in items]

    return parse_list


def ids(value: str, name: str) -> list[int]:
    """Token ids, with commas or blanks between them (brackets as in JSON are taken too)."""
    items = re.split(r"[\s,]+", value.strip().strip("[]").strip(" ,"))
    try:
        return [int(item) for item in items]
    except ValueError:
        raise UsageError(f"{name} must be token ids such as 1,2,3, got {value!r}") from None


def bias(value: str, name: str) -> dict[int, float]:
    """A logit bias: a JSON object, or ``id:bias`` pairs with commas between them."""
    try:
        if value.lstrip().startswith("{"):
            pairs = json.loads(value).items()
        else:
            pairs = [tuple(pair.split(":")) for pair in value.split(",")]
        return {int(token): float(amount) for token, amount in pairs}
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"{name} must be id:bias pairs such as 42:-100, got {value!r}") from None


# -- one flag -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A flag of a command. The first long flag names the destination and the variable."""

    flags: tuple[str, ...]
    help: str
    parse: Parse | None = text  # None: a switch
    metavar: str = "TEXT"
    default: str = ""  # for the help only: what happens when nothing is given
    off: tuple[str, ...] = ()  # of a switch: the flags that turn it off (--no-think)
    many: bool = False  # may be repeated; the value is a list
    aliases: tuple[tuple[str, str], ...] = ()  # (flag, value): --cuda is --device cuda

    @property
    def flag(self) -> str:
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def dest(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def env(self) -> str:
        return f"PYKESTREL_{self.dest.upper()}"

    def read(self, value: str, name: str) -> Any:
        """The parsed value of text from ``name`` (a flag or variable); raises UsageError."""
        return (self.parse or truth)(value, name)

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        note = f" (default: {self.default})" if self.default else ""
        shown = f"{self.help}{note} [env: {self.env}]".replace("%", "%%")
        none = argparse.SUPPRESS
        if self.parse is None:
            parser.add_argument(
                *self.flags,
                dest=self.dest,
                action="store_const",
                const="1",
                default=none,
                help=shown,
            )
            if self.off:
                parser.add_argument(
                    *self.off, dest=self.dest, action="store_const", const="0", default=none,
                    help=f"the opposite of {self.flag} [env: {self.env}=0]",
                )  # fmt: skip
            return
        parser.add_argument(
            *self.flags,
            dest=self.dest,
            action="append" if self.many else "store",
            default=none,
            metavar=self.metavar,
            help=shown,
        )
        for flag, value in self.aliases:
            parser.add_argument(
                flag, dest=self.dest, action="store_const", const=value, default=none,
                help=f"short for {self.flag} {value} [env: {self.env}={value}]",
            )  # fmt: skip

    def resolve(self, given: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
        """The value from the command line, else from the environment, else None."""
        if self.dest in given:
            raw = given[self.dest]
            if self.many:
                return [self.read(item, self.flag) for item in raw]
            return self.read(raw, self.flag)
        raw = environ.get(self.env, "")
        if raw == "":  # an empty variable is how many shells say "unset"
            return None
        if self.many:
            return [self.read(item, self.env) for item in _env_list(raw)]
        return self.read(raw, self.env)


def _env_list(raw: str) -> list[str]:
    """A variable of a flag that may be repeated: one value, or a JSON list of strings."""
    if raw.lstrip().startswith("["):
        try:
            items = json.loads(raw)
        except ValueError:
            return [raw]
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
    return [raw]


# -- the parser of one command --------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors as UsageError and whole option names only."""

    def __init__(self, **kwargs: Any) -> None:
        width = max(60, min(shutil.get_terminal_size().columns - 2, 100))
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=28, width=width
            ),
            **kwargs,
        )

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is not None:
            message = f"unknown argument {unknown[1]!r}"
            known = [s for action in self._actions for s in action.option_strings]
            message += close_to(unknown[1].split("=")[0], known)
        raise UsageError(f"{message}; see {self.prog} --help")


def close_to(word: str, known: Iterable[str]) -> str:
    """``" (did you mean --temp?)"``, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def add_groups(
    parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Option]]
) -> list[Option]:
    """Add titled groups of options; returns them all."""
    options: list[Option] = []
    for title, group in groups.items():
        target = parser.add_argument_group(title)
        for option in group:
            option.add_to(target)
        options.extend(group)
    return options


def exclude(args: argparse.Namespace, chosen: str, others: Sequence[str], why: str) -> None:
    """When option ``chosen`` is set no other may be. Said on the command line, it silences the
    others' variables (and they its own); both from the same place are a UsageError."""
    for other in others:
        if getattr(args, chosen) in (None, False) or getattr(args, other) in (None, False):
            continue
        if (chosen in args.given) == (other in args.given):
            raise UsageError(why)
        setattr(args, other if chosen in args.given else chosen, None)


def resolve_all(
    options: Iterable[Option], given: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Every option's value by destination; None where neither flag nor variable says anything."""
    environ = os.environ if environ is None else environ
    return {option.dest: option.resolve(given, environ) for option in options}
