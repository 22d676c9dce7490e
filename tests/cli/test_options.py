"""Flags as data: precedence, parsing, help, and that every flag has its variable and its docs."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import pytest

from pykestrel.cli import flags
from pykestrel.cli.main import COMMANDS
from pykestrel.cli.options import (
    Option,
    Parser,
    add_groups,
    as_flags,
    bias,
    close_to,
    ids,
    resolve_all,
)
from pykestrel.errors import UsageError
from pykestrel.units import parse_bytes, parse_count, show_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def options_of(command: str) -> tuple[argparse.ArgumentParser, list[Option]]:
    module = import_module(f"pykestrel.cli.{COMMANDS[command][0]}")
    parser = Parser(prog=f"pykestrel {command}")
    return parser, module.configure(parser)


def resolve(options: list[Option], argv: list[str], environ: dict[str, str]) -> dict[str, object]:
    parser = Parser(prog="test")
    add_groups(parser, {"all": options})
    return resolve_all(options, vars(parser.parse_args(argv)), environ)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_variable_that_help_shows(command: str) -> None:
    parser, options = options_of(command)
    shown = " ".join(parser.format_help().split())
    names = [option.env for option in options]
    assert len(set(names)) == len(names)
    for option in options:
        assert option.env == f"PYKESTREL_{option.flag[2:].replace('-', '_').upper()}"
        assert f"[env: {option.env}" in shown, option.flag
    assert "%%" not in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documentation_lists_every_flag(command: str) -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert f"pykestrel {command}" in text
    for option in options_of(command)[1]:
        for flag in (*option.flags, *option.off, *(flag for flag, _ in option.aliases)):
            assert f"`{flag}`" in text, f"{flag} of {command} is missing in docs/cli.md"


def test_quiet_aliases() -> None:
    _, options = options_of("run")
    known = {flag for option in options for flag in option.flags}
    assert known >= {
        "-m", "-p", "-n", "--n-predict", "--max-new-tokens", "--temp", "-c", "--ctx-size",
        "--repeat-penalty", "-sys",
    }  # fmt: skip


def test_flag_beats_environment_beats_nothing() -> None:
    options = list(flags.SAMPLING)
    environ = {"PYKESTREL_TEMPERATURE": "0.5", "PYKESTREL_MAX_TOKENS": "32k", "PYKESTREL_SEED": ""}
    values = resolve(options, ["--temp", "0.25"], environ)
    assert values["temperature"] == 0.25
    assert values["max_tokens"] == 32768
    assert values["seed"] is None  # an empty variable is an unset one
    assert values["top_p"] is None


def test_switches() -> None:
    think = list(flags.THINKING)
    assert resolve(think, [], {})["think"] is None
    assert resolve(think, ["--think"], {})["think"] is True
    assert resolve(think, ["--no-think"], {"PYKESTREL_THINK": "1"})["think"] is False
    assert resolve(think, [], {"PYKESTREL_THINK": "off"})["think"] is False
    device = [flags.DEVICE]
    assert resolve(device, ["--cuda"], {"PYKESTREL_DEVICE": "cpu"})["device"] == "cuda"


def test_a_flag_that_may_be_repeated() -> None:
    stop = [option for option in flags.SAMPLING if option.dest == "stop"]
    assert resolve(stop, ["--stop", "a", "--stop", "b"], {})["stop"] == ["a", "b"]
    assert resolve(stop, [], {"PYKESTREL_STOP": "a,b"})["stop"] == ["a,b"]
    assert resolve(stop, [], {"PYKESTREL_STOP": '["a", "b"]'})["stop"] == ["a", "b"]
    assert resolve(stop, [], {"PYKESTREL_STOP": "[x"})["stop"] == ["[x"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TEMPERATURE", "warm"),
        ("MAX_TOKENS", "-2"),
        ("SEED", "1.5"),
        ("IGNORE_EOS", "perhaps"),
        ("STOP_TOKEN_IDS", "1,,2"),
        ("LOGIT_BIAS", "1=2"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"PYKESTREL_{name}"):
        resolve(list(flags.SAMPLING), [], {f"PYKESTREL_{name}": value})


def test_ids_and_biases() -> None:
    assert ids("1,2, 3", "x") == ids("[1, 2, 3]", "x") == ids("1 2 3", "x") == [1, 2, 3]
    assert bias("42:-100,7:2.5", "x") == bias('{"42": -100, "7": 2.5}', "x") == {42: -100, 7: 2.5}
    for wrong in ("", "a", "1,b", "1.5"):
        with pytest.raises(UsageError, match="--prompt-ids"):
            ids(wrong, "--prompt-ids")


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("4096", 4096), ("32k", 32768), ("1.5K", 1536), ("1m", 2**20)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "k", "1.5", "-3", "1e3", "0.3k", "12g", "١", "9" * 30, "9" * 5000, 2**63, True, 2.0],
)
def test_what_is_no_count(text: object) -> None:
    with pytest.raises(UsageError, match="the thing"):
        parse_count(text, "the thing")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("123", 123), ("1GB", 10**9), ("1 GiB", 2**30), ("1g", 2**30),
        ("1.5MB", 1_500_000), ("7B", 7), ("512MiB", 2**29),
    ],
)  # fmt: skip
def test_byte_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1iB", "1 G B", "1e9", "1XB", False])
def test_what_is_no_byte_size(text: object) -> None:
    with pytest.raises(UsageError, match="--cpu-cache"):
        parse_bytes(text, "--cpu-cache")  # type: ignore[arg-type]


def test_shown_byte_sizes() -> None:
    shown = [show_bytes(x) for x in (0, 999, 1000, 98_362_432, 999_499, 999_600, 3.5e12, 4.2e15)]
    assert shown == ["0 B", "999 B", "1 KB", "98.4 MB", "999 KB", "1 MB", "3.5 TB", "4200 TB"]


def test_unknown_flags_are_answered_with_a_near_one() -> None:
    parser, _ = options_of("run")
    with pytest.raises(UsageError, match=r"'--tmep' \(did you mean --temp\?\)"):
        parser.parse_intermixed_args(["--tmep", "3"])
    with pytest.raises(UsageError, match="--max-tok"):  # no abbreviations: they break later
        parser.parse_intermixed_args(["--max-tok", "3"])


def test_suggestions_begin_alike_or_are_near() -> None:
    flags = ["--max-tokens", "--raw", "--stop", "--verbose", "--top-k", "--think"]
    for word, near in {"--max": "--max-tokens", "--thnik": "--think", "-raw": "--raw"}.items():
        assert close_to(word, flags) == f" (did you mean {near}?)"
    for word in ("--json", "--version", "-x", "--ngl"):
        assert close_to(word, flags) == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--raw", "--", "--foo"], ["--foo"]),
        (["a", "-n", "3", "--", "-b", "--", "c"], ["a", "-b", "--", "c"]),
        (["--", ""], [""]),
        (["--"], []),
    ],
)
def test_two_dashes_end_the_options(argv: list[str], words: list[str]) -> None:
    parser, _ = options_of("run")
    assert isinstance(parser, Parser)
    assert parser.parse(argv)["words"] == words
    single, _ = options_of("quantize")
    assert isinstance(single, Parser)
    assert single.parse(["--quant", "q4", "--", "-m", "-out"]) == {
        "quant": "q4", "source": "-m", "out": "-out",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-p", "-x"], "-p/--prompt needs a value; one that begins with - is written -p=-x"),
        (["-ngl", "99"], "unknown argument '-ngl': --cuda runs the whole model"),
        (["-temp", "1"], r"unknown argument '-temp' \(did you mean --temp\?\)"),
        (["-ctk", "q8_0"], "unknown argument '-ctk'"),
        (["--cuda", "--cpu"], "--cuda and --cpu exclude each other"),
        (["--device", "cuda", "--cpu"], "--cuda and --cpu exclude each other"),
        (["--think", "--no-think"], "--think and --no-think exclude each other"),
    ],
)
def test_refusals_say_what_to_do(argv: list[str], words: str) -> None:
    parser, _ = options_of("run")
    assert isinstance(parser, Parser)
    with pytest.raises(UsageError, match=words):
        parser.parse(argv)


def test_short_flags_may_hold_their_value() -> None:
    parser, options = options_of("run")
    assert isinstance(parser, Parser)
    given = parser.parse(["-n32k", "-qv", "-pHello", "-n=-1", "-t2"])
    assert (given["prompt"], given["quiet"], given["max_tokens"]) == ("Hello", "1", "-1")
    values = resolve_all(options, given, {})
    assert (values["max_tokens"], values["threads"]) == (-1, 2)
    with pytest.raises(UsageError, match="--threads must be at least 1"):
        resolve_all(options, {"threads": "0"}, {})


def test_errors_of_the_api_are_spelled_as_flags() -> None:
    told = "try quant='q4', a smaller ctx_size than 5, or cpu_cache; /tmp/ctx_size/x threads=2"
    assert as_flags(told) == (
        "try --quant q4, a smaller --ctx-size than 5, or --cpu-cache; /tmp/ctx_size/x --threads 2"
    )


def test_words_may_stand_anywhere() -> None:
    parser, _ = options_of("run")
    for argv in (["-n", "5", "a", "b"], ["a", "b", "-n", "5"], ["a", "-n", "5", "b"]):
        given = parser.parse_intermixed_args(argv)
        assert (given.words, given.max_tokens) == (["a", "b"], "5")
