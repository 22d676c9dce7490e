"""A conversation on the terminal.

Lines come from prompt_toolkit where the terminal can do it, else from plain reading. Everything
but the answers goes to stderr. Ctrl+C stops an answer and keeps what was said; at the prompt it
clears the line, and a second one leaves, as Ctrl+D and /bye do.
"""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import Namespace
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ContextError, KestrelError, UsageError
from ..units import plural
from .conversation import (
    SETTINGS,
    Conversation,
    Message,
    Settings,
    file_argument,
    find_setting,
    sampling_of,
)
from .options import as_flags, close_to
from .run import AnswerWriter, warn_of_no_switch
from .terminal import Terminal, decode

if TYPE_CHECKING:
    from ..model import Model, Prompt
    from ..sampling import SamplingParams

HELP = '''\
/set NAME VALUE   change a setting (/set alone lists them, /set NAME resets one)
/system TEXT      set the system message ("" removes it)
/show             the model, the settings and how full the context is
/clear            forget the conversation, keep the system message and settings
/regen            answer the last question again
/save FILE        write the conversation as JSON
/load FILE        read it back; what was chosen in this session stays
/bye              leave (so do Ctrl+D, and Ctrl+C twice)
"""               begin and end text of several lines
Ctrl+C            stop an answer; what came of it stays in the conversation'''

_COMMAND = re.compile(r"/([a-z]*)(?:\s+(.*))?", re.DOTALL | re.IGNORECASE)


class Reader(Protocol):
    """Where lines come from. EOFError ends the conversation."""

    def read(self, prompt: str) -> str: ...


class PlainReader:
    """stdin by lines: pipes, dumb terminals, and a stdout that is not the terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def read(self, prompt: str) -> str:
        if self._terminal.interactive:
            self._terminal.err(prompt)
        try:
            line = sys.stdin.buffer.readline()
        except KeyboardInterrupt:
            self._new_line()  # after the ^C that the terminal shows
            raise
        if not line:
            self._new_line()
            raise EOFError
        return decode(line, "the input").rstrip("\r\n")

    def _new_line(self) -> None:
        if self._terminal.interactive:
            self._terminal.err("\n")


class EditingReader:
    """prompt_toolkit: editing, history across sessions, pasting of many lines."""

    def __init__(self, terminal: Terminal) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import History, InMemoryHistory
        from prompt_toolkit.output import ColorDepth

        history: History
        try:
            history = _history()
        except (KestrelError, OSError) as error:
            terminal.warn(f"no history is kept: {error}")
            history = InMemoryHistory()
        depth = None if terminal.colour_out else ColorDepth.DEPTH_1_BIT
        self._session: PromptSession[str] = PromptSession(history=history, color_depth=depth)

    def read(self, prompt: str) -> str:
        return self._session.prompt(prompt)


def _history() -> Any:
    from prompt_toolkit.history import FileHistory

    from ..files import make_cache_dir

    path = make_cache_dir() / "history"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))  # or OSError, now
    return FileHistory(str(path))


def make_reader(terminal: Terminal) -> Reader:
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown") and sys.platform != "win32"
    if terminal.interactive and sys.stdout.isatty() and not dumb:
        return EditingReader(terminal)
    return PlainReader(terminal)


class Repl:
    """The conversation: messages, settings, and the commands that change them."""

    def __init__(self, model: Model, terminal: Terminal, args: Namespace) -> None:
        self.model = model
        self.terminal = terminal
        self.system: str | None = args.system
        self.system_chosen = args.system is not None  # in this session: a file does not replace it
        self.settings = Settings(args)
        self.messages: list[Message] = []
        self.raw = bool(args.raw)
        self.reader = make_reader(terminal)

    def say(self, text: str) -> None:
        self.terminal.err(text + "\n")

    # -- the loop ------------------------------------------------------------------------------

    def talk(self, first: str | None = None) -> int:
        """Run until the user leaves; the exit code."""
        _ = self.model.tokenizer
        if not self.raw and not self.model.has_chat_template:
            if self.system is not None:
                raise UsageError(
                    f"{self.model.name} has no chat template, so --system has no place in it"
                )
            self.raw = True
            self.terminal.warn(
                f"{self.model.name} has no chat template: every line is completed as it is"
            )
        model = self.model
        self.terminal.note(
            f"{model.name}, {model.quant}, context {model.ctx_size}, on {model.engine.name}; "
            "/help for help, /bye or Ctrl+D leaves"
        )
        self._warn_of_no_switch()
        if first is not None:
            self._ask(first)
        interrupted = False
        while True:
            try:
                text = self._read()
                interrupted = False
                if text.strip() and not self._dispatch(text):
                    return 0
            except EOFError:
                return 0
            except KestrelError as error:  # a line that is no text
                self.terminal.error(str(error))
            except KeyboardInterrupt:
                if interrupted:
                    return 130
                interrupted = True
                self.say("(Ctrl+C again, Ctrl+D or /bye leaves)")

    def _read(self) -> str:
        """One input: a line, or the text between two lines of triple quotes."""
        line = self.reader.read(">>> ")
        start = line.lstrip()
        if not start.startswith('"""'):
            return line
        body = start[3:]
        lines: list[str] = []
        while not body.rstrip().endswith('"""'):
            lines.append(body)
            body = self.reader.read("... ")
        lines.append(body.rstrip()[:-3])
        return "\n".join(lines).strip("\n")

    def _dispatch(self, text: str) -> bool:
        """Do what one input says; False ends the conversation. Errors are told, not raised."""
        command = _COMMAND.fullmatch(text.strip())
        try:
            if command is None:
                self._ask(text)
                return True
            name, rest = command[1].lower(), (command[2] or "").strip()
            if name in ("bye", "exit", "quit"):
                return False
            action = getattr(self, f"_do_{name}", None) if name else None
            if action is None:
                known = [f"/{n[4:]}" for n in dir(self) if n.startswith("_do_")]
                raise UsageError(f"unknown command /{name}{close_to('/' + name, known)}; see /help")
            action(rest)
        except KestrelError as error:
            self.terminal.error(as_flags(str(error)))
        return True

    # -- asking --------------------------------------------------------------------------------

    def _ask(self, text: str) -> None:
        before = self.messages
        self._answer([*before, {"role": "user", "content": text}], otherwise=before)

    def _prompt(self) -> Prompt:
        if self.raw:
            return self.messages[-1]["content"]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def _answer(self, asked: list[Message], *, otherwise: list[Message]) -> None:
        """Answer the last message of ``asked``. The conversation becomes ``asked`` and what came
        of the answer, also after Ctrl+C or an error; ``otherwise`` when nothing came of it."""
        self.messages = asked
        values = self.settings.values
        writer = AnswerWriter(self.terminal, self.model, hide=bool(values.get("hide_thinking")))
        try:
            stream = self.model.stream(
                self._prompt(), thinking=values.get("think"), **sampling_of(values)
            )
            with closing(stream), writer:
                for chunk in stream:
                    writer.write(chunk)
        except KeyboardInterrupt:
            nothing = "\n(stopped before the first word: the question is taken back)"
            self.say("(stopped)" if writer.last is not None else nothing)
        except ContextError as error:
            raise self._too_long(error) from None
        finally:
            if writer.last is None:
                self.messages = otherwise
            else:
                self.messages = [*asked, _answer_message(writer)]
        writer.show_timings()
        if writer.last is not None and writer.last.finish_reason == "length":
            self._note_cut(writer.count)

    def _too_long(self, error: ContextError) -> KestrelError:
        """What to do when the conversation, or one question alone, is longer than the context."""
        if self.raw or len(self.messages) < 2:
            return error
        count, ctx = self.model.count_tokens(self._prompt()), self.model.ctx_size
        limit = self.model.config.max_position_embeddings
        larger = f"/save FILE, start again with a larger --ctx-size (up to {limit}) and /load FILE"
        return ContextError(
            f"the conversation has {count} tokens with this question, and the context holds {ctx}: "
            + (f"{larger}; or /clear forgets it" if ctx < limit else "/clear forgets it")
        )

    def _note_cut(self, count: int) -> None:
        """Which limit ended an answer, unless it is the one that the user set."""
        if self.settings.values.get("max_tokens") == count:
            return
        stated = self._effective().max_tokens
        if stated is not None and count >= stated:
            what = f"generation_config.json states max_tokens {stated}; /set max_tokens -1 lifts it"
        else:
            what = f"the context of {self.model.ctx_size} tokens is full; /clear empties it"
        self.terminal.note(f"(cut: {what})")

    def _effective(self) -> SamplingParams:
        """The sampling values that the next answer would use."""
        values = self.settings.values
        thinking = None if self.raw else self.model.thinks(values.get("think"))
        return self.model.sampling_params(thinking, **sampling_of(values))

    def _warn_of_no_switch(self) -> None:
        if self.settings.values.get("think") and not self.raw:
            warn_of_no_switch(self.model, self.terminal)

    # -- commands ------------------------------------------------------------------------------

    def _do_help(self, rest: str) -> None:
        self.say(HELP)

    def _do_clear(self, rest: str) -> None:
        self.messages.clear()
        self.say("the conversation is forgotten")

    def _do_system(self, rest: str) -> None:
        if self.raw:
            raise UsageError("there is no system message in raw completion")
        if not rest:
            self.say("no system message" if self.system is None else self.system)
            return
        if len(rest) >= 6 and rest.startswith('"""') and rest.endswith('"""'):
            rest = rest[3:-3]
        self.system, self.system_chosen = None if rest == '""' else rest, True
        self.say("system message removed" if self.system is None else "system message set")

    def _do_set(self, rest: str) -> None:
        if not rest:
            self._list_settings()
            return
        word, _, value = rest.partition(" ")
        option = find_setting(word)
        if not value.strip():
            self.settings.reset(option.dest)
            self.say(f"{option.dest} is back to its default: {self._shown(option.dest)}")
            return
        parsed = option.read(value.strip(), option.dest)
        chosen = [parsed] if option.many else parsed
        # refuses what is out of range
        self.model.sampling_params(**sampling_of({**self.settings.values, option.dest: chosen}))
        self.settings.choose(option.dest, chosen)
        self.say(f"{option.dest} = {_json(chosen)}")
        if option.dest == "think":
            self._warn_of_no_switch()

    def _list_settings(self) -> None:
        for name, option in SETTINGS.items():
            self.say(f"{name.ljust(19)} {self._shown(name).ljust(32)} {option.help}")

    def _shown(self, name: str) -> str:
        """The value of a setting that holds now, and where it comes from."""
        origin = self.settings.origin(name)
        if origin is not None:
            return f"{_json(self.settings.values[name])} ({origin})"
        if name == "think":
            thinks = None if self.raw else self.model.thinks()
            return "- (no such switch)" if thinks is None else f"{_json(thinks)} (default)"
        value = getattr(self._effective(), name, False)
        stated = self.model.sampling_params(None)
        key = "max_new_tokens" if name == "max_tokens" else name
        config = self.model.generation_config
        says = config.get(key) is not None or (name == "temperature" and "do_sample" in config)
        from_file = says and getattr(stated, name, None) == value
        shown = "-" if value in (None, (), {}) else _json(value)
        return f"{shown} ({'generation_config' if from_file else 'default'})"

    def _do_show(self, rest: str) -> None:
        model = self.model
        self.say(f"model     {model.name}, {model.quant}, K/V {model.kv}, on {model.engine.name}")
        self.say(f"context   {self._needed()} of {model.ctx_size} tokens used")
        self.say(f"system    {'-' if self.system is None else self.system}")
        self.say(f"messages  {len(self.messages)}")
        shown = [n for n in SETTINGS if self.settings.origin(n) or n in _ALWAYS_SHOWN]
        self.say("settings  " + "\n          ".join(f"{n} = {self._shown(n)}" for n in shown))

    def _needed(self) -> str:
        """How many tokens the conversation takes: what the K/V happens to hold is no such thing."""
        if not self.messages:
            return "0"
        try:
            if self.raw:
                texts = [m["content"] for m in self.messages[-2:]]  # every line is by itself
                return str(self.model.count_tokens("".join(texts)))
            return str(self.model.count_tokens(self._prompt()))
        except KestrelError:  # a template that does not like how the conversation ends
            return "an unknown number"

    def _do_regen(self, rest: str) -> None:
        asked = list(self.messages)
        if asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not asked:
            raise UsageError("there is nothing to answer again")
        self._answer(asked, otherwise=self.messages)

    def _do_save(self, rest: str) -> None:
        path = file_argument(rest, "/save")
        talk = Conversation(self.model.name, self.system, self.settings.values, self.messages)
        there = path.exists()
        talk.save(path)
        self.say(f"saved to {path}" + (", replacing the file that was there" if there else ""))

    def _do_load(self, rest: str) -> None:
        """The messages replace those here; the system message and settings of the file come along
        where this session chose none of its own."""
        path = file_argument(rest, "/load")
        talk = Conversation.load(path)
        together = self.settings.with_loaded(talk.settings)
        self.model.sampling_params(**sampling_of(together))  # refuses what is out of range
        taken, beaten = self.settings.load(talk.settings)
        came = [f"{name} = {_json(value)}" for name, value in taken.items()]
        if talk.system is not None and self.raw:
            beaten = ["no system message (raw completion)", *beaten]
        elif self.system_chosen:
            beaten = ["the system message", *beaten] if talk.system != self.system else beaten
        else:
            came = ["the system message", *came] if talk.system is not None else came
            self.system = talk.system
        self.messages = talk.messages
        line = f"{plural(len(talk.messages), 'message')} loaded from {path}"
        line += f", with {', '.join(came)}" if came else ""
        line += f"; kept from this session: {', '.join(beaten)}" if beaten else ""
        self.say(line)
        if talk.model != self.model.name:
            self.say(f"(they were made with {talk.model})")


_ALWAYS_SHOWN = ("max_tokens", "temperature", "top_k", "top_p")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _answer_message(writer: AnswerWriter) -> Message:
    message = {"role": "assistant", "content": writer.content}
    if writer.reasoning:
        message["reasoning_content"] = writer.reasoning
    return message
