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
from .conversation import SETTINGS, Conversation, Message, file_argument, find_setting, sampling_of
from .flags import THINKING
from .options import close_to
from .run import AnswerWriter, sampling_values, show_timings
from .terminal import Terminal, decode

if TYPE_CHECKING:
    from ..model import Model, Prompt

HELP = '''\
/set NAME VALUE   change a setting (/set alone lists them, /set NAME resets one)
/system TEXT      set the system message ("" removes it)
/show             the model, the settings and how full the context is
/clear            forget the conversation, keep the system message and settings
/regen            answer the last question again
/save FILE        write the conversation as JSON
/load FILE        read it back
/bye              leave (so do Ctrl+D, and Ctrl+C twice)
"""               begin and end text of several lines
Ctrl+C            stop an answer; what came of it stays in the conversation'''

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


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
        self.settings: dict[str, Any] = sampling_values(args)
        for option in THINKING:
            if getattr(args, option.dest) is not None:
                self.settings[option.dest] = getattr(args, option.dest)
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
        self.terminal.note(f"{self.model.name} on {self.model.engine.name}; /help for help")
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
            name, rest = command[1], (command[2] or "").strip()
            if name in ("bye", "exit", "quit"):
                return False
            action = getattr(self, f"_do_{name}", None)
            if action is None:
                known = [f"/{n[4:]}" for n in dir(self) if n.startswith("_do_")]
                raise UsageError(f"unknown command /{name}{close_to('/' + name, known)}; see /help")
            action(rest)
        except KestrelError as error:
            self.terminal.error(str(error))
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
        writer = AnswerWriter(
            self.terminal, self.model, hide=bool(self.settings.get("hide_thinking"))
        )
        try:
            stream = self.model.stream(
                self._prompt(), thinking=self.settings.get("think"), **sampling_of(self.settings)
            )
            with closing(stream), writer:
                for chunk in stream:
                    writer.write(chunk)
        except KeyboardInterrupt:
            nothing = "\n(stopped before the first word: the question is taken back)"
            self.say("(stopped)" if writer.last is not None else nothing)
        except ContextError as error:
            raise ContextError(f"{error}; /clear forgets the conversation") from None
        finally:
            if writer.last is None:
                self.messages = otherwise
            else:
                self.messages = [*asked, _answer_message(writer)]
        show_timings(self.terminal, writer.last)
        if writer.last is not None and writer.last.finish_reason == "length":
            self.terminal.note("(cut: the token limit or the end of the context was reached)")

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
        self.system = None if rest == '""' else rest
        self.say("system message removed" if self.system is None else "system message set")

    def _do_set(self, rest: str) -> None:
        if not rest:
            self._list_settings()
            return
        word, _, value = rest.partition(" ")
        option = find_setting(word)
        if not value.strip():
            self.settings.pop(option.dest, None)
            self.say(f"{option.dest} is back to its default")
            return
        parsed = option.read(value.strip(), option.dest)
        changed = {**self.settings, option.dest: [parsed] if option.many else parsed}
        self.model.sampling_params(**sampling_of(changed))  # refuses what is out of range
        self.settings = changed
        self.say(f"{option.dest} = {json.dumps(changed[option.dest], ensure_ascii=False)}")

    def _list_settings(self) -> None:
        for name, option in SETTINGS.items():
            value = self.settings.get(name)
            shown = "-" if value is None else json.dumps(value, ensure_ascii=False)
            self.say(f"{name.ljust(20)}{shown.ljust(12)} {option.help}")

    def _do_show(self, rest: str) -> None:
        model = self.model
        self.say(f"model     {model.name}, {model.quant}, K/V {model.kv}, on {model.engine.name}")
        self.say(f"context   {model.position} of {model.ctx_size} tokens used")
        self.say(f"system    {'-' if self.system is None else self.system}")
        self.say(f"messages  {len(self.messages)}")
        chosen = json.dumps(self.settings, ensure_ascii=False) if self.settings else "defaults"
        self.say(f"settings  {chosen}")

    def _do_regen(self, rest: str) -> None:
        asked = list(self.messages)
        if asked and asked[-1]["role"] == "assistant":
            asked.pop()
        if not asked:
            raise UsageError("there is nothing to answer again")
        self._answer(asked, otherwise=self.messages)

    def _do_save(self, rest: str) -> None:
        path = file_argument(rest, "/save")
        talk = Conversation(self.model.name, self.system, self.settings, self.messages)
        talk.save(path)
        self.say(f"saved to {path}")

    def _do_load(self, rest: str) -> None:
        path = file_argument(rest, "/load")
        talk = Conversation.load(path)
        self.model.sampling_params(**sampling_of(talk.settings))
        self.system, self.settings, self.messages = talk.system, talk.settings, talk.messages
        self.say(f"{len(talk.messages)} messages loaded from {path}")
        if talk.model != self.model.name:
            self.say(f"(they were made with {talk.model})")


def _answer_message(writer: AnswerWriter) -> Message:
    message = {"role": "assistant", "content": writer.content}
    if writer.reasoning:
        message["reasoning_content"] = writer.reasoning
    return message
