"""Answer a prompt, or talk to a model.

With a prompt (or text on stdin, or both: stdin comes first) the answer goes to stdout and the
command ends. Without one, on a terminal, a conversation begins. A model that has a chat template
is asked as in a chat, unless --raw is given; without --model the demo model is used.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..engines import verify_wanted
from ..errors import TokenizerError, UsageError
from ..units import plural
from .flags import CHAT_TEMPLATE, COMMON, JSON, LOADING, PROMPT_IDS, SAMPLING, THINKING, YES
from .models import model_name, open_model, refuse_model_word, tell_verified
from .options import Option, add_groups, exclude
from .options import text as plain_text
from .terminal import Terminal, read_stdin, stdin_is_piped

if TYPE_CHECKING:
    from ..generate import Chunk, Generation, Timings
    from ..model import Model, Prompt

PROMPT = (
    Option(("-p", "--prompt"), "the prompt (or give it without a flag)"),
    Option(("-sys", "--system"), "the system message of a chat"),
    Option(("--raw",), "complete the prompt as it is, without the chat template", None),
    PROMPT_IDS,
    Option(("-i", "--interactive"), "begin a conversation, also when stdin is a pipe", None),
    CHAT_TEMPLATE,
)


_IDS_ALONE = "--prompt-ids excludes a prompt, --system and --interactive"


def configure(parser: ArgumentParser) -> list[Option]:
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="the prompt")
    return add_groups(
        parser,
        {
            "prompt": PROMPT,
            "model": (*LOADING, YES),
            "sampling": SAMPLING,
            "thinking": THINKING,
            "output": (JSON, *COMMON),
        },
    )


def sampling_values(args: Namespace) -> dict[str, Any]:
    """The sampling flags that were given; what was not is left to the model and the defaults."""
    values = {option.dest: getattr(args, option.dest) for option in SAMPLING}
    return {name: value for name, value in values.items() if value is not None}


def run(args: Namespace, terminal: Terminal) -> int:
    exclude(args, "prompt_ids", ("system", "interactive", "prompt"), _IDS_ALONE)
    exclude(args, "raw", ("system",), "--system needs a chat, and --raw asks for none")
    exclude(args, "json", ("interactive",), "--json is for one answer, not for a conversation")
    prompt = _prompt_text(args, terminal)
    talk = bool(args.interactive) or (prompt is None and args.prompt_ids is None)
    if talk and not args.interactive and not terminal.interactive:
        raise UsageError("no prompt: give one, pipe text into stdin, or use --interactive")
    if talk and "json" in args.given:
        raise UsageError("--json is for one answer: give a prompt")
    check_sampling(args)

    with open_model(args, terminal, name=model_name(args, terminal, demo="offer")) as model:
        if talk:
            from .repl import Repl

            return Repl(model, terminal, args).talk(first=prompt)
        _answer(model, terminal, args, _as_prompt(model, args, prompt))
        if verify_wanted(args.verify):
            tell_verified(terminal, model.session.engine)
    return 0


def check_sampling(args: Namespace) -> None:
    """Refuse wrong sampling values before a model is loaded, naming the flag or the variable."""
    from ..sampling import SamplingParams

    values = sampling_values(args)
    if values.get("max_tokens") == -1:
        del values["max_tokens"]
    for option in SAMPLING:
        if option.dest in values:
            try:
                SamplingParams(**{option.dest: values[option.dest]})
            except UsageError as error:
                source = option.flag if option.dest in args.given else option.env
                words = str(error)
                same = words.startswith(option.dest)
                raise UsageError(
                    source + words[len(option.dest) :] if same else f"{source}: {words}"
                ) from None
    SamplingParams(**values)  # what only together is wrong


def _prompt_text(args: Namespace, terminal: Terminal) -> str | None:
    """stdin, then the prompt: None when there is neither."""
    given: str | None = args.prompt
    if args.words:
        if "prompt" in args.given:
            raise UsageError("the prompt was given twice: with --prompt and without a flag")
        if "prompt_ids" in args.given:
            raise UsageError(_IDS_ALONE)
        args.prompt_ids = None
        refuse_model_word(
            args, args.words[0], "A prompt that begins with that word is given with --prompt"
        )
        given = " ".join(plain_text(word, "the prompt") for word in args.words)
    if args.prompt_ids is not None or args.interactive or not stdin_is_piped():
        return given
    piped = read_stdin(terminal, "prompt")
    if not piped.strip():
        if given is None:
            raise UsageError("no prompt: stdin is empty and none was given")
        return given
    return piped if given is None else f"{piped.rstrip()}\n\n{given}"


def _as_prompt(model: Model, args: Namespace, text: str | None) -> Prompt:
    if args.prompt_ids is not None:
        ids: list[int] = args.prompt_ids
        return ids
    if text is None:
        raise UsageError("no prompt was given")
    _ = model.tokenizer  # without one, say so rather than that there is no chat template
    if args.raw:
        return text
    if not model.has_chat_template:
        if args.system is not None:
            raise UsageError(f"{model.name} has no chat template, so --system has no place in it")
        return text
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _answer(model: Model, terminal: Terminal, args: Namespace, prompt: Prompt) -> None:
    """Stream one answer to stdout; with --json one object at its end."""
    if args.think and isinstance(prompt, list) and args.prompt_ids is None:
        warn_of_no_switch(model, terminal)
    stream = model.stream(prompt, thinking=args.think, **sampling_values(args))
    if args.json:
        from ..generate import Generation

        with closing(stream):
            made = Generation.of(stream)
        show_timings(terminal, made.timings, len(made.tokens), made.finish_reason)
        terminal.json(_facts(model, made))
        return
    with closing(stream), AnswerWriter(terminal, model, hide=bool(args.hide_thinking)) as writer:
        for chunk in stream:
            writer.write(chunk)
    writer.show_timings()


def warn_of_no_switch(model: Model, terminal: Terminal) -> None:
    """Say so when the model cannot be told to think."""
    if model.thinks() is None:
        terminal.warn(
            f"the chat template of {model.name} has no switch for thinking: --think changes nothing"
        )


def _facts(model: Model, made: Generation) -> dict[str, Any]:
    """What --json prints: a `Generation` as JSON data."""
    t = made.timings
    return {
        "model": model.name,
        "text": made.text,
        "content": made.content,
        "reasoning_content": made.reasoning_content,
        "tokens": made.tokens,
        "prompt_tokens": made.prompt_tokens,
        "finish_reason": made.finish_reason,
        "stop_reason": made.stop_reason,
        "timings": {**asdict(t), "prompt_tps": t.prompt_tps, "decode_tps": t.decode_tps},
    }


def show_timings(terminal: Terminal, timings: Timings, count: int, end: str) -> None:
    """Where the time went, with --verbose. count: sampled tokens; end: the finish reason."""
    terminal.detail("\n".join(timings_lines(timings, count, end)))


def timings_lines(t: Timings, count: int, end: str, width: int = 100) -> list[str]:
    """One line where it fits, without rates of what took no time or never was."""
    reused = f" ({t.reused_tokens} reused)" if t.reused_tokens else ""
    parts = [
        f"prompt {plural(t.prompt_tokens, 'token')}{reused}{_speed(t.prompt_tps, ' tokens/s')}"
    ]
    if t.ttft_s > 0:
        parts.append(f"first token {t.ttft_s:.2f} s")
    parts.append(f"answer {plural(count, 'token')}{_speed(t.decode_tps, '/s')}")
    parts.append(f"finish: {end}")
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + 2 + len(part) >= width:
            lines[-1] += ","
            lines.append("")
        lines[-1] += f", {part}" if lines[-1] else part
    return lines


def _speed(value: float, unit: str) -> str:
    shown = f"{value:.1f}" if value < 100 else f"{value:.0f}"
    return f" at {shown}{unit}" if value > 0 else ""


class AnswerWriter:
    """Chunks to stdout as they come; thinking between <think> lines, dim where colour is shown.

    A model without a tokenizer is shown as ids with commas. The answer ends with a newline: one is
    added when the text has none.
    """

    def __init__(self, terminal: Terminal, model: Model, *, hide: bool) -> None:
        self.last: Chunk | None = None
        self.count = 0  # tokens that were sampled
        self.content = ""
        self.reasoning = ""
        self._terminal = terminal
        self._hide = hide
        self._end = "\n"  # the last character written
        self._thinking = False
        self._dim = terminal.colour_out
        try:
            _ = model.tokenizer
            self._ids_only = False
        except TokenizerError:
            self._ids_only = True

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, BrokenPipeError):
            return
        self._close_thinking(answer=False)
        if self._end != "\n":
            self._put("\n")

    def show_timings(self) -> None:
        if self.last is not None:
            end = self.last.finish_reason or "interrupted"
            show_timings(self._terminal, self.last.timings, self.count, end)

    def write(self, chunk: Chunk) -> None:
        self.last = chunk
        self.count += chunk.token is not None
        if self._ids_only:
            if chunk.token is not None:
                self._put(str(chunk.token) if self._end == "\n" else f",{chunk.token}")
            return
        self.reasoning += chunk.reasoning_content
        self.content += chunk.content
        if chunk.reasoning_content and not self._hide:
            if not self._thinking:
                self._thinking = True
                self._put(("\x1b[2m" if self._dim else "") + "<think>\n")
            self._put(chunk.reasoning_content)
        if chunk.content:
            self._close_thinking(answer=True)
            self._put(chunk.content)

    def _close_thinking(self, *, answer: bool) -> None:
        if self._thinking:
            self._thinking = False
            start = "" if self._end == "\n" else "\n"
            self._put(f"{start}</think>\n" + ("\n" if answer else ""))
            if self._dim:
                self._terminal.out("\x1b[0m")

    def _put(self, text: str) -> None:
        if text:
            self._terminal.out(text)
            self._end = text[-1]
