"""The tokenizer inside a GGUF file: equal to the model's own, or refused; and saved as one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import (
    HARM,
    MemorySource,
    byte_level_metadata,
    from_gguf,
    sentencepiece_metadata,
)

from pykestrel.errors import TokenizerError
from pykestrel.text.tokenizer import Tokenizer, stop_set


def test_byte_level_gguf() -> None:
    tokenizer = from_gguf(byte_level_metadata())
    assert len(tokenizer) == 265  # the two unused ids at the end do not count
    assert tokenizer.encode(" hello<|im_end|><think>12") == [260, 263, 264, ord("1"), ord("2")]
    assert tokenizer.special_ids == {262, 263}
    assert tokenizer.decode([264, 263, 265, 266], skip_special_tokens=True) == "<think>"
    assert tokenizer.eos_token_id == 263
    assert tokenizer.eos_ids == {262, 263}  # <|endoftext|> is a control token that ends texts
    assert tokenizer.bos_token_id is None


def test_unused_ids_in_the_middle_stand_for_nothing() -> None:
    types = [1] * 262 + [5, 3, 4, 1, 1]
    tokenizer = from_gguf(byte_level_metadata(token_type=types))
    assert len(tokenizer) == 267
    assert tokenizer.decode([262]) == tokenizer.token_str(262) == ""


def test_bos_of_gguf() -> None:
    plain = byte_level_metadata(bos_token_id=262)
    assert from_gguf(plain).encode("a") == [97]
    assert from_gguf({**plain, "tokenizer.ggml.add_bos_token": True}).encode("a") == [262, 97]
    llama3 = byte_level_metadata(bos_token_id=262, pre="llama-bpe")
    assert from_gguf(llama3).encode("a") == [262, 97]  # llama.cpp's default for this rule
    assert from_gguf({**llama3, "tokenizer.ggml.add_bos_token": False}).encode("a") == [97]
    assert from_gguf({**plain, "tokenizer.ggml.add_eos_token": True}).encode("a") == [97, 263]


WORDS = "I'll we'LL x  y\n\n 123456 4½ don't\t\tfoo_bar ???\r\n日本語 ñandú"


# as written in the tokenizer.json of Qwen2 and Qwen3; Llama 3 takes up to three digits at a time
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@pytest.mark.parametrize(
    ("pre", "patterns"),
    [("qwen2", [QWEN]), ("llama-bpe", [LLAMA3]), ("gpt-2", None), ("smollm", None)],
)
def test_word_splitting_rules(pre: str, patterns: list[str] | None) -> None:
    """``None`` is GPT-2's rule, which the library has built in."""
    from tokenizers import Regex, pre_tokenizers

    byte_level_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=patterns is None)
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns or []]
    expected = pre_tokenizers.Sequence([*splits, byte_level_step]).pre_tokenize_str(WORDS)
    backend = from_gguf(byte_level_metadata(pre=pre))._backend
    assert backend.pre_tokenizer is not None
    got = backend.pre_tokenizer.pre_tokenize_str(WORDS)
    assert [word for word, _ in got] == [word for word, _ in expected]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ...}, "has no tokenizer"),
        ({"model": 3}, "model = 3 where a name"),
        ({"model": "bert"}, "a 'bert' tokenizer"),
        ({"pre": "tekken"}, "word splitting 'tekken'.*not supported; supported are"),
        ({"pre": 5}, "pre = 5 where a name"),
        ({"tokens": ...}, "tokens = nothing where a list of texts"),
        ({"tokens": ["a", 1]}, "a list of texts"),
        ({"tokens": []}, "tokens = 0 tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token twice"),
        ({"tokens": ["a"], "token_type": [5]}, "only unused tokens"),
        ({"token_type": [1]}, "token_type = 1 known types where 267"),
        ({"token_type": [9] * 267}, "token_type = 0 known types"),
        ({"token_type": ["x"] * 267}, "token_type = 0 known types"),
        ({"token_type": 3}, "token_type = 0 known types"),
        ({"merges": ...}, "merges = nothing"),
        ({"merges": ["he"]}, "merges = he where two parts"),
        ({"merges": [""]}, "merges = .*where two parts"),
        ({"merges": ["zz zz"]}, "unusable tokenizer"),
        ({"eos_token_id": 267}, "eos_token_id = 267 where an id below 267"),
        ({"eos_token_id": -1}, "eos_token_id = -1"),
        ({"eos_token_id": "x"}, "eos_token_id = x"),
        ({"eos_token_id": 265}, "eos_token_id = 265"),  # an unused one
        ({"add_bos_token": "x"}, "add_bos_token = x where true or false"),
    ],
)
def test_damaged_gguf_metadata(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words) as caught:
        from_gguf(byte_level_metadata(**changes))
    assert "\n" not in str(caught.value)


KEYS = (
    "model pre tokens token_type merges scores add_bos_token add_eos_token add_space_prefix "
    "bos_token_id eos_token_id unknown_token_id padding_token_id eot_token_id"
)
values = st.sampled_from([*HARM, ..., ["a b"], [1] * 267, [3] * 274, ["a", "ab"], [float("inf")]])


@settings(max_examples=200)
@given(changes=st.dictionaries(st.sampled_from(KEYS.split()), values, min_size=1, max_size=3))
@pytest.mark.parametrize("metadata", [byte_level_metadata, sentencepiece_metadata])
def test_any_damage_of_gguf_loads_or_is_refused(metadata: Any, changes: dict[str, Any]) -> None:
    try:
        tokenizer = from_gguf(metadata(**changes))
    except TokenizerError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 500
        return
    ids = tokenizer.encode("ab hello é")
    assert all(0 <= id < len(tokenizer) for id in ids)
    tokenizer.decode(range(-1, 300))


def test_no_rule_named() -> None:
    assert from_gguf(byte_level_metadata(pre=...)).encode("12") == [49, 50]  # Qwen has one rule
    with pytest.raises(TokenizerError, match="does not say how its tokenizer splits words"):
        from_gguf({**byte_level_metadata(pre=...), "general.architecture": "llama"})


SPM = sentencepiece_metadata()


def spm_reference(text: str) -> list[int]:
    """SentencePiece's BPE, step by step: join the best scored neighbours, leftmost first."""
    tokens: list[str] = SPM["tokenizer.ggml.tokens"]
    scores: list[float] = SPM["tokenizer.ggml.scores"]
    ids = {token: id for id, token in enumerate(tokens) if 259 <= id < len(tokens) - 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        id
        for part in parts
        for id in ([ids[part]] if part in ids else [b + 3 for b in part.encode()])
    ]


@given(text=st.text(alphabet="ab é日本x ", max_size=24))
def test_sentencepiece_encoding(text: str) -> None:
    assert from_gguf_once().encode(text) == [1, *spm_reference(text)]


_SPM: list[Tokenizer] = []


def from_gguf_once() -> Tokenizer:
    if not _SPM:
        _SPM.append(from_gguf(SPM))
    return _SPM[0]


def test_sentencepiece_details() -> None:
    tokenizer = from_gguf_once()
    assert tokenizer.eos_ids == {2}
    assert tokenizer.special_ids == {0, 1, 2}
    ids = tokenizer.encode("ab 日本<tool>")
    assert tokenizer.decode(ids) == "<s> ab 日本<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab 日本<tool>"
    bare = from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert bare.decode(bare.encode(" ab")) == " ab"
    assert bare.encode("ab") == [264]
    for scores in (..., [0.0], [float("nan")] * len(SPM["tokenizer.ggml.tokens"]), "x"):
        with pytest.raises(TokenizerError, match="scores"):
            from_gguf(sentencepiece_metadata(scores=scores))


# -- saving ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level_metadata(bos_token_id=262, add_bos_token=True, add_eos_token=True),
        sentencepiece_metadata(),
        sentencepiece_metadata(add_space_prefix=False, add_bos_token=False),
    ],
)
def test_saved_tokenizer_is_the_same(metadata: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = from_gguf(metadata)
    tokenizer.save(tmp_path, chat_template="{{ messages }}")
    files = {p.name: p.read_text(encoding="utf-8") for p in tmp_path.iterdir()}
    names = {"tokenizer.json", "tokenizer_config.json"}
    assert set(files) == names | (
        {"generation_config.json"} if len(tokenizer.eos_ids) > 1 else set()
    )
    again = Tokenizer.from_source(MemorySource(files))
    for text in ("", " hello he", "ab  é日 12", "<|im_end|><think><tool>"):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.encode(text, False) == tokenizer.encode(text, False)
    assert len(again) == len(tokenizer)
    assert again.special_ids == tokenizer.special_ids
    assert again.eos_token_id == tokenizer.eos_token_id
    stated = json.loads(files.get("generation_config.json", "{}"))
    assert stop_set(stated, (), again) == tokenizer.eos_ids  # no way to end a text is lost
    ids = list(range(-1, len(tokenizer) + 1))
    assert again.decode(ids) == tokenizer.decode(ids)
    # what the library itself would add is what we add
    expected = tokenizer.encode("ab") if tokenizer._prefix else tokenizer.encode("ab", False)
    assert again._backend.encode("ab").ids == expected
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == "{{ messages }}"
