"""`pykestrel run` for one answer: prompts, stdin, ids, chat, thinking, encodings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pykestrel.cli.run import timings_lines
from pykestrel.generate import Timings

from .conftest import Cli, make_tiny_chat

GREEDY = ("--temp", "0", "-n", "12")


def ids_of(text: str) -> list[int]:
    return [int(part) for part in text.strip().split(",")]


def test_ids_in_ids_out(cli: Cli, tiny: Path) -> None:
    done = cli("run", "-m", tiny, "--prompt-ids", "5,6,7", "--ignore-eos", *GREEDY)
    assert done.returncode == 0
    assert done.stderr == ""
    first = ids_of(done.stdout)
    assert len(first) == 12
    again = cli("run", "-m", tiny, "--prompt-ids", "[5, 6, 7]", "--ignore-eos", *GREEDY)
    assert again.stdout == done.stdout
    # what came out goes in again: the last 6 follow from the prompt and the first 6
    longer = ",".join(map(str, [5, 6, 7, *first[:6]]))
    rest = cli("run", "-m", tiny, "--prompt-ids", longer, "--ignore-eos", "--temp", "0", "-n", "6")
    assert ids_of(rest.stdout) == first[6:]


def test_what_the_first_token_does_not_need_is_not_imported(
    env: dict[str, str], tiny: Path
) -> None:
    command = ["run", "--cpu", "-m", str(tiny), "--prompt-ids", "5", "-n", "1", "--temp", "0"]
    unneeded = ["jinja2", "tokenizers", "gguf", "rich", "prompt_toolkit", "huggingface_hub"]
    unneeded += ["safetensors", "numpy.random", "numpy.ma"]
    words = (
        "import sys; from pykestrel.cli import main; "
        f"main({command}); print(sorted({{*{unneeded}}} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", words], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_model_without_a_tokenizer_refuses_text(cli: Cli, tiny: Path) -> None:
    done = cli("run", "-m", tiny, "some words")
    assert done.returncode == 1
    assert "--prompt-ids" in done.stderr or "tokenizer" in done.stderr
    assert cli("run", "-m", tiny, "--prompt-ids", "5", "--stop", "x").returncode == 1


@pytest.mark.parametrize("ids", ["320", "-1", "5,99999"])
def test_ids_outside_the_vocabulary(cli: Cli, tiny: Path, ids: str) -> None:
    done = cli("run", "-m", tiny, f"--prompt-ids={ids}")
    assert done.returncode == 2
    assert "outside the vocabulary" in done.stderr


def test_the_context_limit(cli: Cli, tiny: Path) -> None:
    ids = ",".join(["7"] * 33)
    done = cli("run", "-m", tiny, "-c", "33", "--prompt-ids", ids)
    assert done.returncode == 1
    assert "33 tokens" in done.stderr
    done = cli("run", "-m", tiny, "-c", "34", "--prompt-ids", ids, "--ignore-eos", "-v")
    assert len(ids_of(done.stdout)) == 1
    assert "length" in done.stderr
    done = cli("run", "-m", tiny, "-c", "100k", "--prompt-ids", ids)
    assert (done.returncode, "512" in done.stderr) == (2, True)


def test_a_chat_and_a_raw_completion(cli: Cli, tiny_chat: Path) -> None:
    chat = cli("run", "-m", tiny_chat, *GREEDY, "hello")
    raw = cli("run", "-m", tiny_chat, *GREEDY, "--raw", "hello")
    assert chat.returncode == raw.returncode == 0
    assert chat.stdout != raw.stdout
    by_hand = cli(
        "run", "-m", tiny_chat, *GREEDY, "--raw",
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    )  # fmt: skip
    assert by_hand.stdout == chat.stdout
    with_system = cli("run", "-m", tiny_chat, *GREEDY, "-sys", "be brief", "hello")
    assert with_system.stdout != chat.stdout


def test_stdin_goes_before_the_prompt(cli: Cli, tiny_chat: Path) -> None:
    both = cli("run", "-m", tiny_chat, *GREEDY, "--raw", "world", stdin="hello\n")
    assert both.stdout == cli("run", "-m", tiny_chat, *GREEDY, "--raw", "hello\n\nworld").stdout
    alone = cli("run", "-m", tiny_chat, *GREEDY, "--raw", stdin="hello")
    assert alone.stdout == cli("run", "-m", tiny_chat, *GREEDY, "--raw", "-p", "hello").stdout
    empty = cli("run", "-m", tiny_chat, *GREEDY, "--raw", "hello", stdin="")
    assert empty.stdout == alone.stdout
    assert cli("run", "-m", tiny_chat, stdin=" \n").returncode == 2


def test_stdin_that_is_no_utf8(cli: Cli, tiny_chat: Path) -> None:
    done = cli("run", "-m", tiny_chat, "word", stdin=b"caf\xe9 au lait")
    assert done.returncode == 1
    assert "stdin is not UTF-8 text: byte 0xe9 at offset 3" in done.stderr


def test_an_argument_that_is_no_utf8(cli: Cli, tiny_chat: Path) -> None:
    done = cli("run", "-m", tiny_chat, *GREEDY, "caf\udce9")
    assert done.returncode == 2
    assert "UTF-8" in done.stderr


def test_utf8_words_in_an_ascii_locale(cli: Cli, tiny_chat: Path, env: dict[str, str]) -> None:
    expected = cli("run", "-m", tiny_chat, "--raw", *GREEDY, "caf\u00e9").stdout
    env |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    env["PYKESTREL_PROMPT"] = "caf\u00e9"
    env["PYTHONIOENCODING"] = "utf-8"
    for words in (["caf\u00e9"], []):
        done = cli("run", "-m", tiny_chat, "--raw", *GREEDY, *words)
        assert (done.returncode, done.stdout) == (0, expected)


def test_an_answer_ends_with_one_newline(cli: Cli, tiny_chat: Path) -> None:
    done = cli("run", "-m", tiny_chat, "--raw", *GREEDY, "abc", "-v")
    assert done.stdout.endswith("\n")
    assert "tokens/s" in done.stderr
    assert "tokens/s" not in done.stdout


def test_thinking_is_shown_between_tags_or_hidden(cli: Cli, tiny_chat: Path) -> None:
    shown = cli("run", "-m", tiny_chat, "--think", *GREEDY, "hello")
    assert shown.stdout.startswith("<think>\n")
    assert shown.stdout.endswith("</think>\n")  # random weights do not finish a thought
    hidden = cli("run", "-m", tiny_chat, "--think", "--hide-thinking", *GREEDY, "hello")
    assert (hidden.returncode, hidden.stdout) == (0, "")
    plain = cli("run", "-m", tiny_chat, "--no-think", *GREEDY, "hello")
    assert "<think>" not in plain.stdout


@pytest.mark.parametrize(
    "changes",
    [
        {"LC_ALL": "C", "LANG": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"TERM": "dumb"},
        {"NO_COLOR": "1"},
    ],
)
def test_poor_locales_and_terminals(
    cli: Cli, tiny_chat: Path, env: dict[str, str], changes: dict[str, str]
) -> None:
    # byte tokens of random weights: control characters, halves of characters, accents
    args = ("run", "-m", tiny_chat, "--raw", "--temp", "2", "--seed", "3", "-n", "200", "abc", "-v")
    env.update(changes)
    done = cli(*args)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 50
    assert "\x1b[" not in done.stderr


def test_stop_strings_and_seeds(cli: Cli, tiny_chat: Path) -> None:
    args = ("run", "-m", tiny_chat, "--raw", "-n", "60", "--seed", "7", "abc")
    first = cli(*args)
    assert cli(*args).stdout == first.stdout
    text = first.stdout.rstrip("\n")
    stop = text[5:8]
    done = cli(*args, "--stop", stop)
    assert done.stdout.rstrip("\n") == text[: text.index(stop)]


def test_a_chat_template_of_ones_own(cli: Cli, tiny_chat: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}")
    done = cli("run", "-m", tiny_chat, *GREEDY, "--chat-template", template, "hello")
    assert done.stdout == cli("run", "-m", tiny_chat, *GREEDY, "--raw", "hello").stdout
    template.write_text("{{ raise_exception('not like this') }}")
    done = cli("run", "-m", tiny_chat, "--chat-template", template, "hello")
    assert (done.returncode, "not like this" in done.stderr) == (1, True)
    template.write_text("{% if %}")
    assert cli("run", "-m", tiny_chat, "--chat-template", template, "hello").returncode == 1
    assert cli("run", "-m", tiny_chat, "--chat-template", tmp_path, "hello").returncode == 2
    assert cli("run", "-m", tiny_chat, "--chat-template", "none", "hello").returncode == 2


def test_a_broken_template_of_the_model_is_said(cli: Cli, tmp_path: Path) -> None:
    path = make_tiny_chat(tmp_path / "broken")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for %}"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert cli("run", "-m", path, "hello").returncode == 1
    assert cli("run", "-m", path, "--raw", *GREEDY, "hello").returncode == 0


def test_a_model_without_a_template_completes(cli: Cli, tmp_path: Path) -> None:
    path = make_tiny_chat(tmp_path / "plain")
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    done = cli("run", "-m", path, *GREEDY, "hello")
    assert done.stdout == cli("run", "-m", path, *GREEDY, "--raw", "hello").stdout
    done = cli("run", "-m", path, *GREEDY, "-sys", "x", "hello")
    assert (done.returncode, "no chat template" in done.stderr) == (2, True)


def test_json(cli: Cli, tiny_chat: Path) -> None:
    args = ("run", "-m", tiny_chat, "--think", *GREEDY, "hello")
    done = cli(*args, "--json", "-v")
    result = json.loads(done.stdout)
    assert result["reasoning_content"]
    assert result["content"] == ""
    assert (len(result["tokens"]), result["finish_reason"]) == (12, "length")
    assert result["timings"]["decode_tokens"] == 11
    assert "answer 12 tokens at" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("finish: length")


def test_timings_say_only_what_was_measured() -> None:
    none = Timings(prompt_tokens=1)
    assert timings_lines(none, 0, "length") == ["prompt 1 token, answer 0 tokens, finish: length"]
    one = Timings(prompt_tokens=1234, reused_tokens=1200, prompt_s=0.5, ttft_s=0.51)
    (line,) = timings_lines(one, 1, "stop")
    start = "prompt 1234 tokens (1200 reused) at 68.0 tokens/s, first token 0.51 s, "
    assert line == f"{start}answer 1 token, finish: stop"
    long = Timings(9**9, 9**9, 9**8, 1e-3, 9999, 9**9, 1e-3)
    assert all(len(line) <= 100 for line in timings_lines(long, 9**9, "length"))


def test_no_limit_is_minus_one(cli: Cli, tiny_chat: Path) -> None:
    path = (tiny_chat, "-c", "40", "--ignore-eos", "--raw", "--json", "abc")
    done = cli("run", "-n", "-1", "-m", *path)
    assert len(json.loads(done.stdout)["tokens"]) == 37


def test_a_template_without_a_switch_for_thinking(
    cli: Cli, tiny_chat: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    args = ("run", "-m", tiny_chat, *GREEDY, "--chat-template", "t.jinja", "hello")
    assert cli(*args).stderr == ""
    assert "no switch for thinking" in cli(*args, "--think").stderr


def test_a_template_that_was_given_is_to_be_corrected(
    cli: Cli, tiny_chat: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text("{% if true %}")
    done = cli("run", "-m", tiny_chat, "--chat-template", "t.jinja", "hello")
    assert ".;" not in done.stderr
    assert "; correct it, or leave it out to use the model's own" in done.stderr


@pytest.mark.model
def test_the_demo_model_answers(cli: Cli, demo_model: Path) -> None:
    done = cli("run", "-m", demo_model, "--temp", "0", "-n", "24", "What is the capital of France?")
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert done.stderr == ""
