"""Turn text into token ids, or back.

The text is an argument, or stdin. Without other flags every token is shown on a line of its own,
with its id and its piece of text.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from ..errors import UsageError
from .flags import COMMON, JSON, MODEL
from .models import model_name
from .options import Option, add_groups, ids
from .options import text as plain_text
from .terminal import Terminal, read_stdin, stdin_is_piped

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
    if args.decode is not None and args.words:
        raise UsageError("--decode excludes a text")
    text = None if args.decode is not None else _text(args)

    from ..loading import resolve_model
    from ..text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_source(resolve_model(model_name(args, terminal)))
    if text is None:
        from ..generate import check_ids

        terminal.line(tokenizer.decode(check_ids(args.decode, len(tokenizer))))
        return 0
    found = tokenizer.encode(text, add_special_tokens=args.special is not False)
    pieces = [tokenizer.token_str(token) for token in found]
    if args.json:
        terminal.line(json.dumps({"ids": found, "pieces": pieces}, ensure_ascii=False))
    elif args.count:
        terminal.line(str(len(found)))
    elif args.ids:
        terminal.line(",".join(map(str, found)))
    else:
        for token, piece in zip(found, pieces, strict=True):
            terminal.line(f"{token:>8}  {_shown(tokenizer.token_bytes(token), piece)}")
        terminal.note(f"{len(found)} tokens")
    return 0


def _shown(data: bytes, piece: str) -> str:
    """The text of a token, the bytes of one that is part of a character, or its name."""
    try:
        return repr(data.decode()) if data else piece
    except UnicodeDecodeError:
        return repr(data)


def _text(args: Namespace) -> str:
    if args.words:
        return " ".join(plain_text(word, "the text") for word in args.words)
    if stdin_is_piped():
        return read_stdin()
    raise UsageError("no text: give one, or pipe it into stdin")
