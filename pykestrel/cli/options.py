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

from ..environment import FALSE, TRUE
from ..errors import UsageError
from ..units import parse_bytes, parse_count

Parse = Callable[[str, str], Any]  # (text, name of the flag or variable) -> value


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


def limit(value: str, name: str) -> int:
    """A count, or -1 for no limit, as in llama.cpp and Ollama."""
    return -1 if value.strip() == "-1" else parse_count(value, name)


def positive(value: str, name: str) -> int:
    """A count of at least 1."""
    number = parse_count(value, name)
    if number < 1:
        raise UsageError(f"{name} must be at least 1, got {value!r}")
    return number


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


def operations(value: str, name: str) -> float:
    """A count of operations, such as 1e7: 0 or more."""
    number = real(value, name)
    if not 0 <= number < float("inf"):
        raise UsageError(f"{name} must be 0 or more and finite, got {value!r}")
    return number


def truth(value: str, name: str) -> bool:
    word = value.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
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
                *self.flags, dest=self.dest, action=_Constant, const="1", default=none, help=shown
            )
            if self.off:
                parser.add_argument(
                    *self.off, dest=self.dest, action=_Constant, const="0", default=none,
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
                flag, dest=self.dest, action=_Constant, const=value, default=none,
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


class _Constant(argparse.Action):
    """A flag that stands for a value. Beside one that stands for another it is refused."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, **rest: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, **rest)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, self.const)
        if before != self.const:
            flags = parser._option_string_actions.items()
            same = [flag for flag, a in flags if a.dest == self.dest and a.const == before]
            first = same[0] if same else f"{_long(parser, self.dest)} {before}"
            raise UsageError(f"{first} and {option_string} exclude each other: give one of them")
        setattr(namespace, self.dest, self.const)


def _long(parser: argparse.ArgumentParser, dest: str) -> str:
    flags = parser._option_string_actions.items()
    return next(flag for flag, action in flags if action.dest == dest and flag.startswith("--"))


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

_LITERAL = "\0"  # before a word that follows --: no word of a command line can hold it

# Flags of other runners that mean something else here.
_FOREIGN = {
    ("-ngl", "--n-gpu-layers", "--gpu-layers", "--ngl"): "--cuda runs the whole model on the GPU "
    "and --cpu none of it",
}


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
        self.options: list[Option] = []
        self.model_words: Callable[[str], bool] = lambda word: False  # is it the name of a model?

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """What the command line itself says, by destination. Every word after ``--`` is a word
        of the command, whatever it begins with (argparse alone loses it between its passes)."""
        own, words = split_words(argv)
        self._refuse_foreign(own)
        marked = [*own, *(_LITERAL + word for word in words)]
        return {k: _unmarked(v) for k, v in vars(self.parse_intermixed_args(marked)).items()}

    def _refuse_foreign(self, argv: Sequence[str]) -> None:
        """``-ngl 99`` is not ``-n gl``: a short flag that takes no text has no letters after it."""
        numeric = {
            flag
            for option in self.options
            for flag in option.flags
            if option.parse not in (None, text) and len(flag) == 2
        }
        known = self._option_string_actions
        for word in argv:
            flag = word.split("=")[0]
            if flag not in known and word[:2] in numeric and word[2:3].isalpha():
                self.error(f"unrecognized arguments: {word}")

    def error(self, message: str) -> NoReturn:
        message = message.replace(_LITERAL, "")
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        needy = re.match(r"argument (\S+): expected (?:one|at least one) argument", message)
        if unknown is not None:
            message = f"unknown argument {unknown[1]!r}{self._instead(unknown[1])}"
        elif needy is not None:
            message = (
                f"{needy[1]} needs a value; one that begins with - is written "
                f"{needy[1].split('/')[0]}=-x"
            )
            if any(not action.option_strings for action in self._actions):
                message += "; words without a flag may follow --"
        raise UsageError(f"{message}; see {self.prog} --help")

    def _instead(self, word: str) -> str:
        flag = word.split("=")[0]
        for names, advice in _FOREIGN.items():
            if flag in names and "--device" in self._option_string_actions:
                return f": {advice}"
        if not word.startswith("-"):
            takes_model = "--model" in self._option_string_actions
            return f" (did you mean -m {word}?)" if takes_model and self.model_words(word) else ""
        return close_to(flag, [s for action in self._actions for s in action.option_strings])


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first ``--``, and what after it."""
    args = list(argv)
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at + 1 :]


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    return value[1:] if isinstance(value, str) and value.startswith(_LITERAL) else value


def close_to(word: str, known: Iterable[str]) -> str:
    """``" (did you mean --temp?)"``, or nothing when no known word is near.

    A word that a known one begins with comes before one that only looks like it.
    """
    bare = {name.lstrip("-/"): name for name in sorted(known, key=len, reverse=True)}
    start = word.lstrip("-/")
    begun = [name for name in bare if len(start) > 1 and name.startswith(start)]
    near = begun[-1:] or difflib.get_close_matches(start, list(bare), n=1, cutoff=0.65)
    return f" (did you mean {bare[near[0]]}?)" if near else ""


_AS_FLAGS = {  # how an error of the API is spelled on the command line
    r"quant='(\w+)'": r"--quant \1",
    r"device '(\w+)'": r"--device \1",
    r"(?<![\w/.-])(ctx_size|cpu_cache|max_tokens)(?![\w/.-])": None,
    r"(?<![\w/.-])threads=(\d+)": r"--threads \1",
}


def as_flags(text: str) -> str:
    """An error's words with the names of arguments as flags."""
    for pattern, flag in _AS_FLAGS.items():
        text = re.sub(pattern, flag or (lambda found: "--" + found[0].replace("_", "-")), text)
    return text


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
    if isinstance(parser, Parser):
        parser.options.extend(options)
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
