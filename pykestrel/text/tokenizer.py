"""Text to token ids and back.

`Tokenizer` encodes with the `tokenizers` library and decodes by itself (see `pieces`), so that one
definition serves whole texts and streams. It is built from a model directory (`dir_tokenizer`) or
from the metadata of a GGUF file (`gguf_tokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import KestrelError, ModelError, TokenizerError, UsageError
from .pieces import Pieces

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENS = 1 << 22  # a larger vocabulary is a damaged or hostile file: real ones end at 2**18


class TextSource(Protocol):
    """What this package asks of `loading.Source`."""

    @property
    def kind(self) -> str:
        """ "dir" or "gguf"."""

    @property
    def path(self) -> Path:
        """The directory or the .gguf file."""

    def read_json(self, name: str) -> Any:
        """A JSON file of the directory; None when it is not there."""

    def read_text(self, name: str) -> str | None:
        """A text file of the directory; None when it is not there."""

    def gguf(self) -> Any:
        """Of a GGUF file: an object whose ``metadata`` maps keys to Python values."""


@dataclass
class Parts:
    """A tokenizer taken apart: what the two builders hand to `Tokenizer`."""

    backend: tokenizers.Tokenizer
    pieces: Pieces
    size: int  # largest id + 1
    special_ids: frozenset[int]
    named: dict[str, str] = field(default_factory=dict)  # "bos_token": "<s>", ... for templates
    prefix: tuple[int, ...] = ()  # ids that `add_special_tokens` puts before a text
    suffix: tuple[int, ...] = ()  # and after it
    ends: frozenset[int] = frozenset()  # ids that end a text, besides eos_token
    unused: frozenset[int] = frozenset()  # ids that stand for nothing


class Tokenizer:
    """One model's tokenizer. Safe to share between threads."""

    def __init__(self, parts: Parts) -> None:
        self._backend = parts.backend
        self._pieces = parts.pieces
        self._size = parts.size
        self._prefix = list(parts.prefix)
        self._suffix = list(parts.suffix)
        self._unused = parts.unused
        self._added = {
            id: token.content for id, token in parts.backend.get_added_tokens_decoder().items()
        }
        self._bytes: dict[int, bytes] = {}
        self.special_tokens: dict[str, str] = dict(parts.named)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        named = (self.bos_token_id, self.eos_token_id, self._named_id("pad_token"))
        self.special_ids: frozenset[int] = parts.special_ids.union(
            id for id in named if id is not None
        )
        ends = parts.ends | ({self.eos_token_id} if self.eos_token_id is not None else set())
        self.eos_ids: frozenset[int] = frozenset(ends)

    @classmethod
    def from_source(cls, source: TextSource) -> Tokenizer:
        """The tokenizer of a model; TokenizerError when there is none or it cannot be used."""
        try:
            # Whatever passes the checks and still breaks (a token that is half a surrogate pair).
            with rust_errors(lambda words: TokenizerError(_unusable(source.path, words))):
                if source.kind == "gguf":
                    from .gguf_tokenizer import parts_from_gguf

                    return cls(parts_from_gguf(source.gguf().metadata, source.path.name))
                from .dir_tokenizer import parts_from_dir

                return cls(parts_from_dir(source))
        except TokenizerError:
            raise
        except ModelError as error:  # of reading a file: it is the tokenizer that is missing now
            raise TokenizerError(str(error)) from None

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        found = None if text is None else self._backend.token_to_id(text)
        return found if found is not None and found < self._size else None

    def __len__(self) -> int:
        """The number of ids; a model's padding ids at and above it decode to ""."""
        return self._size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; special tokens written out in it become their ids.

        ``add_special_tokens`` adds what the model was trained to see around a text (often a
        beginning-of-text id, often nothing); a rendered chat template has it already. Surrogate
        halves, which are no text, count as U+FFFD.
        """
        if not isinstance(text, str):
            raise UsageError(f"text to encode must be a str, got {type(text).__name__}")
        with rust_errors(lambda words: TokenizerError(f"the tokenizer failed: {words}")):
            ids = self._backend.encode(_well_formed(text), add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD.

        Special tokens are shown unless ``skip_special_tokens``; added tokens that are not special
        (``<think>``, ``<tool_call>``) are always shown. Ids outside the vocabulary give nothing.
        """
        skip = self.special_ids if skip_special_tokens else ()
        data = b"".join(self.token_bytes(i) for i in ids if i not in skip)
        return data[self.leading_spaces(data) :].decode("utf-8", "replace")

    def leading_spaces(self, data: bytes) -> int:
        """How many leading bytes of a whole text decoding drops (SentencePiece's first space)."""
        most = self._pieces.strip_spaces
        return next((n for n in range(most) if data[n : n + 1] != b" "), most) if data else 0

    @property
    def strip_spaces(self) -> int:
        """The most that `leading_spaces` returns."""
        return self._pieces.strip_spaces

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one id adds to a text; b"" for an id outside the vocabulary."""
        found = self._bytes.get(id)
        if found is None:
            entry = self.token_str(id)
            found = entry.encode("utf-8", "replace") if id in self._added else b""
            if id not in self._added and entry:
                found = self._pieces.of_entry(entry)
            self._bytes[id] = found
        return found

    def token_str(self, id: int) -> str:
        """The vocabulary's own name of an id ("Ġworld"); "" for an id outside the vocabulary."""
        if not 0 <= id < self._size or id in self._unused:
            return ""
        if id in self._added:
            return self._added[id]
        return self._backend.id_to_token(id) or ""

    def save(self, directory: Path, *, chat_template: str | None = None) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers would read them; and,
        when several ids end a text, generation_config.json, the only place that takes a list."""
        from ..files import atomic_write

        config: dict[str, Any] = {
            "add_bos_token": self.bos_token_id is not None and self.bos_token_id in self._prefix,
            "add_eos_token": self.eos_token_id is not None and self.eos_token_id in self._suffix,
            "added_tokens_decoder": {
                str(id): {
                    "content": token.content,
                    "lstrip": token.lstrip,
                    "normalized": token.normalized,
                    "rstrip": token.rstrip,
                    "single_word": token.single_word,
                    "special": id in self.special_ids,
                }
                for id, token in sorted(self._backend.get_added_tokens_decoder().items())
            },
            **self.special_tokens,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if chat_template is not None:
            config["chat_template"] = chat_template
        files = {"tokenizer.json": self._backend.to_str(), "tokenizer_config.json": _json(config)}
        if self.eos_ids - {self.eos_token_id}:
            first = [] if self.eos_token_id is None else [self.eos_token_id]
            others = sorted(self.eos_ids - set(first))
            files["generation_config.json"] = _json({"eos_token_id": [*first, *others]})
        for name, text in files.items():
            with atomic_write(directory / name) as file:
                file.write(text.encode())


def stop_set(
    generation_config: Mapping[str, Any],
    config_eos: Iterable[int] = (),
    tokenizer: Tokenizer | None = None,
) -> frozenset[int]:
    """The ids that end a text: the union of ``eos_token_id`` in generation_config.json (an int or
    a list), that of config.json, and the tokenizer's own.

    Raises ModelError for an ``eos_token_id`` that is neither.
    """
    stated = generation_config.get("eos_token_id")
    listed = stated if isinstance(stated, (list, tuple)) else [] if stated is None else [stated]
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(
                f"generation_config.json has eos_token_id {value!r}; an id or a list of ids was "
                "wanted"
            )
    own = tokenizer.eos_ids if tokenizer is not None else frozenset()
    return frozenset(listed) | frozenset(config_eos) | own


def _unusable(path: Path, words: str) -> str:
    return (
        f"{path} has an unusable tokenizer: {words}; download the model again, or run it with "
        "token ids (--prompt-ids)"
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _well_formed(text: str) -> str:
    """``text`` with surrogate pairs joined and lone halves replaced, so that it has UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@contextmanager
def rust_errors(wrap: Any) -> Iterator[None]:
    """Turn any failure inside the `tokenizers` library into ``wrap(its words)``.

    A panic of its Rust code arrives as PanicException, which is no Exception.
    """
    try:
        yield
    except (KestrelError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise wrap(words if len(words) <= 200 else words[:197] + "...") from None
