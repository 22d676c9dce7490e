"""Text out of a stream of token ids, emitted at code-point edges only."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids into text one at a time.

    The joined results of `push` and the final `flush` equal ``tokenizer.decode`` of all ids,
    whatever the ids are: both read the same bytes as UTF-8, and a UTF-8 decoder can stop and go on
    anywhere. A character whose bytes are not all there yet waits; when the stream ends inside one,
    `flush` gives it as U+FFFD. The work is linear in the bytes.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._reset()

    def _reset(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._to_strip = self._tokenizer.strip_spaces  # leading spaces that may still be dropped

    def push(self, id: int) -> str:
        """Add one id; return the text that is certain now, often "" or one word."""
        if id in self._skip:
            return ""
        data = self._tokenizer.token_bytes(id)
        while self._to_strip and data:
            if data[:1] == b" ":
                data = data[1:]
                self._to_strip -= 1
            else:
                self._to_strip = 0
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest: U+FFFD for an unfinished character, else "". Starts the decoder anew."""
        rest = self._utf8.decode(b"", final=True)
        self._reset()
        return rest
