"""A conversation, as a user at a terminal has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Cli
from .pty_session import PtySession

Terminal = Callable[..., PtySession]
PROMPT = r">>> ?$"  # prompt_toolkit moves the cursor instead of writing the blank


def start(terminal: Terminal, model: Path, *args: str) -> PtySession:
    session = terminal("run", "-m", model, "--temp", "0", "-n", "8", *args)
    session.expect("/help for help")
    session.expect(PROMPT)
    return session


@pytest.fixture(params=["xterm", "dumb"])
def any_terminal(request: pytest.FixtureRequest, env: dict[str, str]) -> str:
    """Both readers: prompt_toolkit, and plain lines on a dumb terminal."""
    env["TERM"] = request.param
    return str(request.param)


@pytest.mark.usefixtures("any_terminal")
class TestEitherReader:
    def test_ask_and_leave(self, terminal: Terminal, tiny_chat: Path) -> None:
        session = start(terminal, tiny_chat)
        session.line("hello")
        session.expect(PROMPT)
        session.line("/bye")
        assert session.wait() == 0

    def test_end_of_input_leaves(self, terminal: Terminal, tiny_chat: Path) -> None:
        session = start(terminal, tiny_chat)
        session.type("\x04")
        assert session.wait() == 0

    def test_ctrl_c_at_the_prompt(self, terminal: Terminal, tiny_chat: Path) -> None:
        session = start(terminal, tiny_chat)
        session.type("half a line\x03")
        session.expect(r"Ctrl\+C again")
        session.expect(PROMPT)
        session.line("/show")  # the line was cleared, and one more input forgives the Ctrl+C
        session.expect("messages  0")
        session.expect(PROMPT)
        session.type("\x03")
        session.expect(r"Ctrl\+C again")
        session.expect(PROMPT)
        session.type("\x03")
        assert session.wait() == 130

    def test_settings(self, terminal: Terminal, tiny_chat: Path) -> None:
        session = start(terminal, tiny_chat)
        for line, answer in [
            ("/set temperature 0.5", "temperature = 0.5"),
            ("/set temp 0.25", "temperature = 0.25"),
            ("/set max-tokens 1k", "max_tokens = 1024"),
            ("/set stop END", r'stop = \["END"\]'),
            ("/set think on", "think = true"),
            ("/set temperature hot", "error: temperature must be a number, got 'hot'"),
            ("/set top_p 3", "error: .*top_p"),
            ("/set temprature 1", r"error: unknown setting 'temprature' \(did you mean temper"),
            ("/set stop", "stop is back to its default"),
            ("/shwo", r"error: unknown command /shwo \(did you mean /show\?\)"),
            ("/set", "repetition_penalty"),
            ("/help", "/regen"),
            ("/system be brief", "system message set"),
            ("/system", "be brief"),
            ("/show", r"temperature = 0.25 \(/set\)"),
            ('/system ""', "system message removed"),
            ("/clear", "forgotten"),
            ("/save", "error: /save needs a file name"),
            ("/regen", "error: there is nothing to answer again"),
        ]:
            session.line(line)
            session.expect(answer)
            session.expect(PROMPT)

    def test_many_lines(self, terminal: Terminal, tiny_chat: Path, tmp_path: Path) -> None:
        session = start(terminal, tiny_chat)
        session.line('"""first')
        session.expect(r"\.\.\. ?$")
        session.line("  /second")
        session.expect(r"\.\.\. ?$")
        session.line('third"""')
        session.expect(PROMPT)
        session.line("/save talk.json")
        session.expect("saved to")
        session.expect(PROMPT)
        saved = json.loads((tmp_path / "talk.json").read_text())
        assert saved["messages"][0] == {"role": "user", "content": "first\n  /second\nthird"}
        assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]

    def test_save_load_regen(self, terminal: Terminal, tiny_chat: Path, tmp_path: Path) -> None:
        session = start(terminal, tiny_chat, "-sys", "be brief")
        session.line("hello")
        session.expect(PROMPT)
        session.line("/save a.json")
        session.expect(PROMPT)
        session.line("/regen")
        session.expect(PROMPT)
        session.line("/save b.json")
        session.expect(PROMPT)
        a, b = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
        assert a == b  # greedy, and computed again from what the K/V still held
        assert a["system"] == "be brief"
        assert a["settings"] == {"temperature": 0.0, "max_tokens": 8}
        session.line("/clear")
        session.expect(PROMPT)
        session.line("/load a.json")
        session.expect("2 messages loaded")
        session.expect(PROMPT)
        (tmp_path / "bad.json").write_text('{"messages": [{"role": "root", "content": ""}]}')
        for name in ("bad.json", "missing.json", "."):
            session.line(f"/load {name}")
            session.expect("error: ")
            session.expect(PROMPT)
        session.line("/save /nowhere/at/all.json")
        session.expect("error: ")
        session.expect(PROMPT)

    def test_what_was_chosen_wins_over_a_file(
        self, terminal: Terminal, tiny_chat: Path, tmp_path: Path
    ) -> None:
        saved = {
            "model": "another", "system": "be long",
            "settings": {"temperature": 1.5, "max_tokens": 7, "top_k": 5},
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        }  # fmt: skip
        (tmp_path / "t.json").write_text(json.dumps(saved))
        session = start(terminal, tiny_chat, "-sys", "be brief")
        session.line("/load t.json")
        session.expect(
            "2 messages loaded from t.json, with top_k = 5; kept from this session: the system "
            "message, temperature, max_tokens"
        )
        session.expect(PROMPT)
        session.line("/show")
        for line in (
            "context   [1-9][0-9]* of", "system    be brief", r"max_tokens = 8 \(--max-tokens\)",
            r"temperature = 0.0 \(--temperature\)", r"top_k = 5 \(/load\)",
            r"top_p = 0.8 \(default\)|top_p = [0-9.]+ \(default\)",
        ):  # fmt: skip
            session.expect(line)
        session.expect(PROMPT)
        session.line("/set temp")
        session.expect("back to its default: 0.6")
        session.expect(PROMPT)
        session.line("/clear")
        session.expect(PROMPT)
        session.line("/show")
        session.expect("context   0 of")

    def test_a_file_brings_what_was_not_chosen(
        self, terminal: Terminal, tiny_chat: Path, tmp_path: Path
    ) -> None:
        saved = {"system": "be long", "settings": {"seed": 1}, "messages": []}
        (tmp_path / "t.json").write_text(json.dumps(saved))
        (tmp_path / "bad.json").write_text("{")
        session = start(terminal, tiny_chat)
        session.line("/load t.json")
        session.expect("0 messages loaded from t.json, with the system message, seed = 1\n")
        session.line("/load bad.json")
        session.expect("error: bad.json is not a conversation: it is not JSON\n")
        session.line("/save t.json")
        session.expect("saved to t.json, replacing the file that was there")
        session.line("/")
        session.expect("error: unknown command /; see /help")

    def test_a_conversation_that_fills_the_context(
        self, terminal: Terminal, tiny_chat: Path
    ) -> None:
        session = start(terminal, tiny_chat, "-c", "120", "--ignore-eos")
        session.line("hello")
        session.expect(PROMPT)  # nothing is said of a limit that the user set
        assert "cut" not in session.text
        session.line("x" * 100)
        session.expect("error: the conversation has [0-9]+ tokens with this question, and the")
        session.expect("--ctx-size.*/load FILE; or /clear")
        session.expect(PROMPT)
        session.line("/set max_tokens -1")
        session.expect("max_tokens = -1")
        session.line("hello")
        session.expect("cut: the context of 120 tokens is full")

    def test_a_full_context_ends_the_answer_not_the_session(
        self, terminal: Terminal, tiny_chat: Path
    ) -> None:
        session = start(terminal, tiny_chat, "-c", "80")
        session.line("x" * 90)
        session.expect("error: the prompt has .*context holds 80.*--ctx-size")
        session.expect(PROMPT)
        session.line("/show")
        session.expect("messages  0")
        session.line("hello")
        session.expect(PROMPT)


def test_history_is_kept_across_sessions(terminal: Terminal, tiny_chat: Path) -> None:
    for _ in range(2):
        session = start(terminal, tiny_chat)
        session.line("/set seed 5")
        session.expect(PROMPT)
        session.line("/bye")
        session.wait()
    session = start(terminal, tiny_chat)
    session.type("\x1b[A\x1b[A")  # up, up: /bye, then the line before it
    session.expect("/set seed 5")
    session.type("\r")
    session.expect("seed = 5")


def test_an_unwritable_cache_only_costs_the_history(
    terminal: Terminal, tiny_chat: Path, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    env["PYKESTREL_CACHE"] = str(tmp_path / "file" / "cache")
    session = terminal("run", "-m", tiny_chat, "-n", "4")
    session.expect("no history is kept")
    session.expect(PROMPT)
    session.line("hello")
    session.expect(PROMPT)


def test_no_colour_when_it_is_not_wanted(
    terminal: Terminal, tiny_chat: Path, env: dict[str, str]
) -> None:
    env["TERM"] = "dumb"
    session = terminal("run", "-m", tiny_chat, "-n", "20", "--think", "-v", "hello")
    assert session.wait() == 0
    assert "\x1b" not in session.raw.replace(session.raw[: session.raw.find("<think>")], "")
    env |= {"TERM": "xterm", "NO_COLOR": "1"}
    session = terminal("run", "-m", tiny_chat, "-n", "20", "--think", "-v", "hello")
    assert session.wait() == 0
    assert "\x1b[2m" not in session.raw
    assert "\x1b[3" not in session.raw


def test_lines_from_a_pipe(cli: Cli, tiny_chat: Path, tmp_path: Path) -> None:
    lines = 'hello\n"""two\nlines"""\n/save t.json\n/nonsense\n'
    done = cli("run", "-m", tiny_chat, "-i", "--temp", "0", "-n", "6", stdin=lines)
    assert done.returncode == 0
    assert "unknown command /nonsense" in done.stderr
    assert ">>>" not in done.stdout + done.stderr
    saved = json.loads((tmp_path / "t.json").read_text())
    answers = [m["content"] for m in saved["messages"] if m["role"] == "assistant"]
    asked = [m["content"] for m in saved["messages"] if m["role"] == "user"]
    assert asked == ["hello", "two\nlines"]
    assert len(answers) == 2
    assert saved["system"] is None
    # the second answer, with the K/V of the first reused, is that of a fresh process
    lines = f"/load {tmp_path / 't.json'}\n/regen\n/save u.json\n"
    cli("run", "-m", tiny_chat, "-i", "--temp", "0", "-n", "6", stdin=lines)
    assert json.loads((tmp_path / "u.json").read_text())["messages"] == saved["messages"]


def test_a_first_question_on_the_command_line(cli: Cli, tiny_chat: Path) -> None:
    once = cli("run", "-m", tiny_chat, "--temp", "0", "-n", "6", "hello")
    done = cli("run", "-m", tiny_chat, "-i", "--temp", "0", "-n", "6", "hello", stdin="")
    assert done.stdout == once.stdout


def test_raw_conversation(cli: Cli, tiny_chat: Path) -> None:
    once = cli("run", "-m", tiny_chat, "--raw", "--temp", "0", "-n", "6", "hello")
    done = cli("run", "-m", tiny_chat, "--raw", "-i", "--temp", "0", "-n", "6", stdin="hello\n")
    assert done.stdout == once.stdout


def test_a_line_that_is_no_utf8_ends_no_conversation(cli: Cli, tiny_chat: Path) -> None:
    done = cli("run", "-m", tiny_chat, "-i", "-n", "4", stdin=b"caf\xe9\nhello\n")
    assert done.returncode == 0
    assert "not UTF-8" in done.stderr
    assert done.stdout


# -- the demo model: fetching it, and stopping it -------------------------------------------------


def test_without_a_terminal_nothing_is_fetched_unasked(cli: Cli) -> None:
    done = cli("run", "hello")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert "--model" in done.stderr


def test_ctrl_c_at_the_question_ends_its_line(terminal: Terminal) -> None:
    session = terminal("run", "hello")
    session.expect(r"\[Y/n\] ")
    session.type("\x03")
    assert session.wait() == 130
    assert session.text.endswith("\n")


def test_the_question_may_be_declined(terminal: Terminal) -> None:
    session = terminal("run", "hello")
    session.expect(r"Fetch the demo model .*\? \[Y/n\] ")
    session.line("n")
    assert session.wait() == 2


@pytest.mark.model
def test_ctrl_c_stops_an_answer_and_keeps_it(
    terminal: Terminal, demo_model: Path, tmp_path: Path
) -> None:
    session = terminal("run", "-m", demo_model, "--temp", "0", "--ignore-eos", "-n", "3000")
    session.expect(PROMPT)
    session.line("Count from one to one thousand, one number a line.")
    session.expect(r"a line\.\s+[A-Za-z0-9]")  # the echo of the question, then the answer
    session.type("\x03")
    session.expect("stopped", timeout=20)
    session.expect(PROMPT)
    session.line("/save t.json")
    session.expect("saved to")
    session.expect(PROMPT)
    saved = json.loads((tmp_path / "t.json").read_text())["messages"]
    assert [m["role"] for m in saved] == ["user", "assistant"]
    assert saved[1]["content"]
    session.line("/set max_tokens 8")
    session.expect(PROMPT)
    session.line("Say hello.")
    session.expect(PROMPT)
    session.line("/bye")
    assert session.wait() == 0


@pytest.mark.model
def test_ctrl_c_ends_a_single_answer_with_130(terminal: Terminal, demo_model: Path) -> None:
    session = terminal(
        "run", "-m", demo_model, "--ignore-eos", "-n", "3000", "--raw", "Once upon a time"
    )
    session.expect(r"[a-z]{3}.*[a-z]{3}")
    session.type("\x03")
    assert session.wait(20) == 130
    assert "Traceback" not in session.text
