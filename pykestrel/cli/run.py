"""Answer a prompt, or talk to a model.

With a prompt (or text on stdin, or both: stdin comes first) the answer goes to stdout and the
command ends. Without one, on a terminal, a conversation begins. A model that has a chat template
is asked as in a chat, unless --raw is given; without --model the demo model is used.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError, UsageError
from .flags import CHAT_TEMPLATE, COMMON, LOADING, PROMPT_IDS, SAMPLING, THINKING, YES
from .models import model_name, open_model
from .options import Option, add_groups, exclude
from .options import text as plain_text
from .terminal import Terminal, read_stdin, stdin_is_piped

if TYPE_CHECKING:
    from ..generate import Chunk, Timings
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
            "output": COMMON,
        },
    )


def sampling_values(args: Namespace) -> dict[str, Any]:
    """The sampling flags that were given; what was not is left to the model and the defaults."""
    values = {option.dest: getattr(args, option.dest) for option in SAMPLING}
    return {name: value for name, value in values.items() if value is not None}


def run(args: Namespace, terminal: Terminal) -> int:
    exclude(args, "prompt_ids", ("system", "interactive", "prompt"), _IDS_ALONE)
    exclude(args, "raw", ("system",), "--system needs a chat, and --raw asks for none")
    prompt = _prompt_text(args)
    talk = bool(args.interactive) or (prompt is None and args.prompt_ids is None)
    if talk and not args.interactive and not terminal.interactive:
        raise UsageError("no prompt: give one, pipe text into stdin, or use --interactive")
    check_sampling(args)

    with open_model(args, terminal, name=model_name(args, terminal, demo=True)) as model:
        if talk:
            from .repl import Repl

            return Repl(model, terminal, args).talk(first=prompt)
        _answer(model, terminal, args, _as_prompt(model, args, prompt))
    return 0


def check_sampling(args: Namespace) -> None:
    """Refuse wrong sampling values before a model is loaded, naming the flag or the variable."""
    from ..sampling import SamplingParams

    values = sampling_values(args)
    for option in SAMPLING:
        if option.dest in values:
            try:
                SamplingParams(**{option.dest: values[option.dest]})
            except UsageError as error:
                source = option.flag if option.dest in args.given else option.env
                raise UsageError(f"{source}: {error}") from None
    SamplingParams(**values)  # what only together is wrong


def _prompt_text(args: Namespace) -> str | None:
    """stdin, then the prompt: None when there is neither."""
    given: str | None = args.prompt
    if args.words:
        if "prompt" in args.given:
            raise UsageError("the prompt was given twice: with --prompt and without a flag")
        if "prompt_ids" in args.given:
            raise UsageError(_IDS_ALONE)
        args.prompt_ids = None
        given = " ".join(plain_text(word, "the prompt") for word in args.words)
    if args.prompt_ids is not None or args.interactive or not stdin_is_piped():
        return given
    piped = read_stdin()
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
    """Stream one answer to stdout."""
    stream = model.stream(prompt, thinking=args.think, **sampling_values(args))
    with closing(stream), AnswerWriter(terminal, model, hide=bool(args.hide_thinking)) as writer:
        for chunk in stream:
            writer.write(chunk)
    show_timings(terminal, writer.last)


def show_timings(terminal: Terminal, chunk: Chunk | None) -> None:
    if chunk is not None:
        end = chunk.finish_reason or "interrupted"
        terminal.detail(f"{timings_line(chunk.timings)}, {end}")


def timings_line(t: Timings) -> str:
    reused = f" ({t.reused_tokens} reused)" if t.reused_tokens else ""
    return (
        f"prompt {t.prompt_tokens} tokens{reused} {t.prompt_tps:.1f} tokens/s, "
        f"first token after {t.ttft_s:.2f} s, "
        f"answer {t.decode_tokens + 1} tokens {t.decode_tps:.1f} tokens/s, load {t.load_s:.1f} s"
    )


class AnswerWriter:
    """Chunks to stdout as they come; thinking between <think> lines, dim where colour is shown.

    A model without a tokenizer is shown as ids with commas. The answer ends with a newline: one is
    added when the text has none.
    """

    def __init__(self, terminal: Terminal, model: Model, *, hide: bool) -> None:
        self.last: Chunk | None = None
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

    def write(self, chunk: Chunk) -> None:
        self.last = chunk
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
