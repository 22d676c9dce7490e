"""Tiny tokenizers and sources for the tests of text: whole, in memory, no file needed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pykestrel.text.pieces import byte_of_char
from pykestrel.text.tokenizer import Tokenizer


@dataclass
class MemorySource:
    """A `loading.Source` whose files are in memory: name -> text, or a value for JSON."""

    files: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] | None = None
    path: Path = Path("tiny")

    @property
    def kind(self) -> str:
        return "dir" if self.metadata is None else "gguf"

    def read_text(self, name: str) -> str | None:
        value = self.files.get(name)
        return value if value is None or isinstance(value, str) else json.dumps(value)

    def read_json(self, name: str) -> Any:
        value = self.files.get(name)
        return json.loads(value) if isinstance(value, str) else value

    def gguf(self) -> Any:
        return SimpleNamespace(metadata=self.metadata)


NAMES = {byte: char for char, byte in byte_of_char().items()}
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("Ã", "©")]
ADDED = [("<s>", True), ("</s>", True), ("<think>", False), ("</think>", False), ("é→", False)]


# Values that do not belong where they are put.
HARM = [
    None, True, -1, 0, 2**31, 2**32, 2**63, 1.5, "", "x", "<s>", "\0", [], {}, [[]], ["a"],
    {"a": 1}, {"type": "BPE"}, "(", {"type": "ByteLevel"}, {"Regex": "("}, "h e",
]  # fmt: skip


def byte_level_spec() -> dict[str, Any]:
    """A tokenizer.json: 256 bytes, 6 merges, added tokens of every kind; 267 ids."""
    tokens = [NAMES[b] for b in range(256)] + [left + right for left, right in MERGES]
    added = [
        {
            "id": len(tokens) + n,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for n, (content, special) in enumerate(ADDED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [list(pair) for pair in MERGES],
        },
    }


def byte_level(**config: Any) -> Tokenizer:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer.from_source(
        MemorySource(
            {"tokenizer.json": byte_level_spec(), "tokenizer_config.json": {**named, **config}}
        )
    )


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece model: 3 special, 256 byte, 15 other tokens."""
    words = ["▁", "a", "b", "é", "▁a", "ab", "▁▁", "▁▁▁▁", "aa", "aaa", "▁ab", "日", "本", "日本"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    singles = {"▁", "a", "b", "é", "日", "本"}
    scores = [0.0] * len(tokens)
    for n, word in enumerate(words):  # single characters are no merges: SentencePiece puts them low
        scores[259 + n] = -1000.0 if word in singles else -float(n)
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not ...}


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE: 256 bytes, the merges, 3 special tokens, 2 unused."""
    tokens = [NAMES[b] for b in range(256)] + [left + right for left, right in MERGES]
    extra = ["<|endoftext|>", "<|im_end|>", "<think>", "[PAD0]", "[PAD1]"]
    metadata = {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *extra],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4, 5, 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not ...}


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_source(MemorySource(metadata=metadata, path=Path("tiny.gguf")))
