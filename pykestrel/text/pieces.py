"""What a token id stands for in bytes; text is those bytes read as UTF-8.

Working on bytes makes streaming exact: the bytes of a sequence are the joined bytes of its ids, and
UTF-8 can be decoded piece by piece. Two families exist:

* byte-level (GPT-2, Llama 3, Qwen): every byte is written as one printable character, so that a
  vocabulary entry is a string of byte names ("Ġthe" is b" the");
* SentencePiece (Llama 2): a vocabulary entry is text with "▁" for a space, and <0xE4> is one byte.

An added token ("<think>", "<|im_end|>") stands for its own text in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import TokenizerError

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """GPT-2's names of the 256 bytes: printable Latin-1 characters stand for themselves, the
    other 68 bytes, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    names.update((chr(0x100 + n), b) for n, b in enumerate(others))
    return names


@dataclass(frozen=True)
class Pieces:
    """How vocabulary entries become bytes."""

    byte_level: bool
    strip_spaces: int = 0  # leading spaces of a whole text that decoding removes (SentencePiece)

    def of_entry(self, entry: str) -> bytes:
        """The bytes of a vocabulary entry that is not an added token."""
        if self.byte_level:
            names = byte_of_char()
            try:
                return bytes([names[c] for c in entry])
            except KeyError:  # not written in byte names: stands for itself
                return entry.encode("utf-8", "replace")
        match = _BYTE_TOKEN.fullmatch(entry)
        if match:
            return bytes([int(match[1], 16)])
        return entry.replace(SPACE_MARK, " ").encode("utf-8", "replace")


def pieces_of_decoder(decoder: Any, where: str) -> Pieces:
    """The `Pieces` that equal the ``decoder`` section of a tokenizer.json.

    Raises TokenizerError for a decoder that is neither byte-level nor SentencePiece's: text made
    by another rule would be wrong without anybody noticing.
    """
    steps = list(_flat(decoder))
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return Pieces(byte_level=True)
    strip, marked = 0, False
    for step, kind in zip(steps, kinds, strict=True):
        if kind in ("ByteFallback", "Fuse"):
            continue
        by_space = step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
        if kind == "Replace" and by_space:
            marked = True
            continue
        if kind == "Metaspace" and step.get("replacement", SPACE_MARK) == SPACE_MARK:
            marked = True
            scheme = step.get("prepend_scheme", "always")
            strip = 0 if scheme == "never" or step.get("add_prefix_space") is False else 1
            continue
        if kind == "Strip" and step.get("content") == " " and not step.get("stop"):
            start = step.get("start")
            if isinstance(start, int) and 0 <= start <= 8:
                strip = start
                continue
        raise _unknown_decoder(decoder, where)
    if not marked:
        raise _unknown_decoder(decoder, where)
    return Pieces(byte_level=False, strip_spaces=strip)


def _flat(decoder: Any, depth: int = 0) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, Mapping) or depth > 4:
        return [{}]
    if decoder.get("type") == "Sequence":
        inner = decoder.get("decoders")
        inner = inner if isinstance(inner, list) else [None]
        return [step for d in inner for step in _flat(d, depth + 1)]
    return [decoder]


def _unknown_decoder(decoder: Any, where: str) -> TokenizerError:
    shown = json.dumps(decoder, default=str)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return TokenizerError(
        f"{where} decodes by {shown}, but only byte-level BPE (ByteLevel) and SentencePiece "
        "(Replace, ByteFallback, Fuse, Strip or Metaspace) decoders are supported; run the model "
        "with token ids instead (--prompt-ids)"
    )
