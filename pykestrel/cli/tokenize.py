"""Turn text into token ids, or back.

The text is an argument, or stdin. Without other flags every token is shown on a line of its own,
with its id and its piece of text.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..units import plural
from .flags import COMMON, JSON, MODEL
from .models import model_name, refuse_model_word
from .options import Option, add_groups, exclude, ids
from .options import text as plain_text
from .terminal import Terminal, read_stdin, stdin_is_piped

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

OPTIONS = (
    Option(("--ids",), "print the ids only, with commas between them", None),
    Option(("--decode",), "print the text of these ids", ids, "1,2,3"),
    Option(("--count",), "print the number of tokens only", None),
    Option(
        ("--special",), "add the special tokens of a raw prompt", None,
        default="as the tokenizer says", off=("--no-special",),
    ),
)  # fmt: skip


def configure(parser: ArgumentParser) -> list[Option]:
    parser.add_argument("words", nargs="*", metavar="TEXT", help="the text; without it, stdin")
    groups = {"tokenizer": (MODEL, *OPTIONS), "output": (JSON, *COMMON)}
    return add_groups(parser, groups)


def run(args: Namespace, terminal: Terminal) -> int:
    exclude(args, "count", ("ids",), "--count and --ids exclude each other")
    for other in ("count", "ids"):
        exclude(args, "decode", (other,), f"--decode and --{other} exclude each other")
    if args.decode is not None and args.words:
        raise UsageError("--decode excludes a text")
    text = None if args.decode is not None else _text(args, terminal)

    from ..loading import resolve_model
    from ..text.tokenizer import Tokenizer

    name = model_name(args, terminal, demo="pulled")
    tokenizer = Tokenizer.from_source(resolve_model(name))
    if text is None:
        from ..generate import check_ids

        found = check_ids(args.decode, len(tokenizer))
        text = tokenizer.decode(found)
        if args.json:
            terminal.json({"ids": found, "text": text})
        else:
            terminal.line(text)
        return 0
    found = tokenizer.encode(text, add_special_tokens=args.special is not False)
    if args.json:
        terminal.json(_facts(tokenizer, found, args))
    elif args.count:
        terminal.line(str(len(found)))
    elif args.ids:
        terminal.line(",".join(map(str, found)))
    else:
        for token in found:
            data = tokenizer.token_bytes(token)
            terminal.line(f"{token:>8}  {_shown(data, tokenizer.token_str(token))}")
        terminal.note(plural(len(found), "token"))
    return 0


def _facts(tokenizer: Tokenizer, found: list[int], args: Namespace) -> dict[str, Any]:
    """What --json prints. A piece that is part of a character is shown with U+FFFD, and its bytes
    stand in ``bytes``, which is null for every other."""
    if args.count:
        return {"count": len(found)}
    if args.ids:
        return {"ids": found}
    pieces: list[str] = []
    parts: list[list[int] | None] = []
    for token in found:
        data = tokenizer.token_bytes(token)
        try:
            pieces.append(data.decode() if data else tokenizer.token_str(token))
            parts.append(None)
        except UnicodeDecodeError:
            pieces.append(data.decode(errors="replace"))
            parts.append(list(data))
    return {"count": len(found), "ids": found, "pieces": pieces, "bytes": parts}


def _shown(data: bytes, piece: str) -> str:
    """The text of a token, the bytes of one that is part of a character, or its name."""
    try:
        return repr(data.decode()) if data else piece
    except UnicodeDecodeError:
        return repr(data)


def _text(args: Namespace, terminal: Terminal) -> str:
    if args.words:
        refuse_model_word(args, args.words[0], "A text that begins with that word goes into stdin")
        return " ".join(plain_text(word, "the text") for word in args.words)
    if stdin_is_piped():
        return read_stdin(terminal)
    raise UsageError("no text: give one, or pipe it into stdin")
