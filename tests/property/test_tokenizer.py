"""Tokenizers from strangers' files: right, or refused in one sentence; never a crash, never a
quietly different vocabulary."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import (
    ADDED,
    HARM,
    MERGES,
    NAMES,
    MemorySource,
    byte_level,
    byte_level_spec,
)

from pykestrel.errors import ModelError, TokenizerError, UsageError
from pykestrel.text.pieces import byte_of_char, pieces_of_decoder
from pykestrel.text.tokenizer import MAX_TOKENS, Tokenizer, stop_set


def load(spec: Any, config: Any = None, **files: Any) -> Tokenizer:
    all_files = {"tokenizer.json": spec, "tokenizer_config.json": config, **files}
    return Tokenizer.from_source(MemorySource(all_files))


def refused(words: str, spec: Any, config: Any = None, **files: Any) -> None:
    with pytest.raises(TokenizerError, match=words) as caught:
        load(spec, config, **files)
    assert "\n" not in str(caught.value)


# -- directories -------------------------------------------------------------------------------


def test_byte_names_are_gpt2s() -> None:
    names = byte_of_char()
    assert sorted(names.values()) == list(range(256))
    assert (names["Ġ"], names["Ċ"], names["!"], names["Ń"]) == (0x20, 0x0A, 0x21, 0xAD)


def test_ids_and_special_tokens() -> None:
    tokenizer = byte_level()
    assert len(tokenizer) == 256 + len(MERGES) + len(ADDED) == 267
    assert tokenizer.encode(" hello") == [260]
    assert tokenizer.encode("<s>x<think>") == [262, ord("x"), 264]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (262, 263)
    assert tokenizer.special_ids == {262, 263}
    assert tokenizer.decode([262, 260, 264, 263], skip_special_tokens=True) == " hello<think>"
    assert tokenizer.decode([262, 260, 264, 263]) == "<s> hello<think></s>"
    assert (tokenizer.token_str(260), tokenizer.token_bytes(260)) == ("Ġhello", b" hello")
    assert tokenizer.decode([267, 10**12, -1]) == tokenizer.token_str(-1) == ""
    assert tokenizer.encode("é→é") == [266, 261]  # an added token with letters beyond ASCII
    assert tokenizer.decode([266]) == "é→"
    assert tokenizer.encode("") == []
    with pytest.raises(UsageError, match="must be a str, got bytes"):
        tokenizer.encode(b"x")  # type: ignore[arg-type]


def test_surrogates_are_no_text() -> None:
    tokenizer = byte_level()
    assert tokenizer.encode("\ud83e\udd16") == tokenizer.encode("🤖")
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        "<s>": {"id": "<s>", "ids": [262], "tokens": ["<s>"]},
        "</s>": {"id": "</s>", "ids": [263], "tokens": ["</s>"]},
    },
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
ROBERTA = {"type": "RobertaProcessing", "add_prefix_space": False, "trim_offsets": False}
NAMED = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.mark.parametrize(
    ("processor", "config", "expected"),
    [
        (None, {}, [97]),
        (TEMPLATE, {}, [262, 97, 263]),
        ({"type": "Sequence", "processors": [BYTE_LEVEL, TEMPLATE]}, {}, [262, 97, 263]),
        ({**ROBERTA, "cls": ["<s>", 262], "sep": ["</s>", 263]}, {}, [262, 97, 263]),
        (TEMPLATE, {"add_bos_token": False}, [97, 263]),
        (TEMPLATE, {"add_bos_token": True, "add_eos_token": False}, [262, 97]),
        (None, {"add_bos_token": True}, [262, 97]),
        (None, {"add_eos_token": True}, [97, 263]),
    ],
)
def test_first_and_last_tokens(processor: Any, config: Any, expected: list[int]) -> None:
    spec = byte_level_spec()
    spec["post_processor"] = copy.deepcopy(processor)
    tokenizer = load(spec, {**NAMED, **config})
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_truncation_in_the_file_never_cuts() -> None:
    spec = byte_level_spec()
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    assert len(load(spec).encode("abcdef")) == 6


def test_tokens_that_only_the_config_lists() -> None:
    """transformers adds them, and believes the config about what is special."""
    listed = {
        "264": {"content": "<think>", "special": True},
        "267": {"content": "<new>", "special": True},
        "268": {"content": "<newer>", "special": False},
    }
    tokenizer = load(byte_level_spec(), {"added_tokens_decoder": listed})
    assert len(tokenizer) == 269
    assert tokenizer.encode("<new><newer>") == [267, 268]
    assert tokenizer.special_ids == {262, 263, 264, 267}
    older = load(byte_level_spec(), None, **{"added_tokens.json": {"<new>": 267}})
    assert older.encode("<new>") == [267]
    wrong = {"300": {"content": "<new>", "special": True}}
    refused(r"'<new>' the id 300, but by its place it is 267", byte_level_spec(),
            {"added_tokens_decoder": wrong})  # fmt: skip


def test_vocab_and_merges_without_tokenizer_json() -> None:
    spec = byte_level_spec()["model"]
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in MERGES) + "\n"
    files = {"vocab.json": spec["vocab"], "merges.txt": merges}
    listed = {"262": {"content": "<|im_end|>", "special": True}}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": listed,
    }
    tokenizer = load(None, config, **files)
    assert tokenizer.encode(" hello<|im_end|>") == [260, 262]
    assert tokenizer.encode("e\u0301") == [261]  # Qwen's tokenizer composes: NFC
    refused("tokenizer_class 'BloomTokenizer' is not one of", None,
            {"tokenizer_class": "BloomTokenizer"}, **files)  # fmt: skip
    refused("merges.txt has a line that is not two parts", None, config,
            **{**files, "merges.txt": "a b c\n"})  # fmt: skip
    refused("cannot be used", None, config, **{**files, "merges.txt": "no such\n"})
    refused("has no tokenizer.json; download", None)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((), [1], "the file = a list where an object"),
        (("model",), None, "model = None where an object"),
        (("model", "type"), "WordPiece", "model.type = 'WordPiece'"),
        (("model", "continuing_subword_prefix"), "##", "continuing_subword_prefix = '##'"),
        (("model", "end_of_word_suffix"), "</w>", "end_of_word_suffix"),
        (("model", "merges"), None, "model.merges = None where a list"),
        (("model", "merges", 0), ["no", "such"], "cannot be used"),
        (("model", "vocab"), 3, "model.vocab = 3"),
        (("model", "vocab"), {}, "at least one token"),
        (("model", "vocab", "a"), -1, "an id = -1"),
        (("model", "vocab", "a"), "97", "an id = '97'"),
        (("model", "vocab", "a"), MAX_TOKENS, f"an id from 0 to {MAX_TOKENS - 1}"),
        (("model", "vocab", "a"), 2**80, "an id = 1208925819614629174706176"),
        (("model", "vocab", "a"), 98, "two tokens of model.vocab the same id"),
        (("added_tokens",), {}, "added_tokens = a dict where a list"),
        (("added_tokens", 0), "<s>", r"added_tokens\[0\] = '<s>'"),
        (("added_tokens", 0, "id"), True, r"added_tokens\[0\].id = True"),
        (("added_tokens", 0, "id"), 500, "'<s>' the id 500, but by its place it is 262"),
        (("decoder",), None, "decodes by null, but only"),
        (("decoder",), {"type": "WordPiece"}, "decodes by .*WordPiece"),
        (("post_processor",), {"type": "New"}, "post_processor.type = 'New'"),
        (("post_processor",), {**TEMPLATE, "special_tokens": {}}, "one text or a known token"),
        (("post_processor",), {**TEMPLATE, "single": []}, "a template with the text in it"),
        (("pre_tokenizer",), {"type": "New"}, "cannot be used"),
        (("pre_tokenizer",), {"type": "Split", "pattern": {"Regex": "("}}, "cannot be used"),
    ],
)
def test_damaged_tokenizer_json(path: tuple[Any, ...], value: Any, words: str) -> None:
    spec: Any = byte_level_spec()
    at = spec
    for key in path[:-1]:
        at = at[key]
    if path:
        at[path[-1]] = value
    refused(words, spec if path else value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bos_token": 5}, "bos_token = 5 where a token's text"),
        ({"add_bos_token": "yes"}, "add_bos_token = 'yes' where true or false"),
        ({"add_bos_token": True}, "bos_token is None, which is no token"),
        ({"add_bos_token": True, "bos_token": "<nope>"}, "'<nope>', which is no token"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder = a list"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "a key = 'x'"),
        ({"added_tokens_decoder": {"267": {}}}, r"added_tokens_decoder\[267\]"),
        ([1], "holds a list where an object"),
        ({"eos_token": "\ud800"}, "unusable tokenizer.*surrogates.*--prompt-ids"),
        ({"add_bos_token": True, "bos_token": "\ud800"}, "unusable tokenizer.*surrogates"),
    ],
)
def test_damaged_config(config: Any, words: str) -> None:
    refused(words, byte_level_spec(), config)


def test_text_that_is_no_json() -> None:
    refused(r"not valid JSON \(line 1\)", "{nope")
    refused("not valid JSON", "[" * 100_000)
    refused("not valid JSON", "")


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        keys = list(value)[:20]
    elif isinstance(value, list):
        keys = list(range(min(len(value), 4)))
    else:
        return found
    return found + [p for key in keys for p in paths_of(value[key], (*path, key))]


FULL = byte_level_spec() | {"post_processor": TEMPLATE, "normalizer": {"type": "NFC"}}


@settings(max_examples=400)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(paths_of(FULL)), st.sampled_from([*HARM, ...])),
        min_size=1,
        max_size=3,
    )
)
def test_any_damage_loads_right_or_is_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    spec: Any = copy.deepcopy(FULL)
    for path, value in changes:
        at = spec
        try:
            for key in path[:-1]:
                at = at[key]
            if value is ...:
                del at[path[-1]]
            else:
                at[path[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError, AttributeError):
            pass
    try:
        tokenizer = load(spec)
    except TokenizerError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 500
        return
    try:
        ids = tokenizer.encode("he hello <s> 12 <think>é")
    except TokenizerError:
        return
    assert all(0 <= id < len(tokenizer) for id in ids)
    for token, id in spec["model"]["vocab"].items():
        assert tokenizer.token_str(id) == token
    tokenizer.decode(range(300))


# -- what ends a text --------------------------------------------------------------------------


def test_stop_set() -> None:
    tokenizer = byte_level()
    assert stop_set({}) == frozenset()
    assert stop_set({"eos_token_id": 5}, (6,), tokenizer) == {5, 6, 263}
    assert stop_set({"eos_token_id": [5, 7]}, (5,)) == {5, 7}
    assert stop_set({"eos_token_id": None}, (), tokenizer) == {263}
    for bad in ("5", [5, None], 5.0, True, -1):
        with pytest.raises(ModelError, match="eos_token_id"):
            stop_set({"eos_token_id": bad})


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=3), lambda s: st.lists(s) | (
    st.dictionaries(st.sampled_from(["type", "decoders", "pattern", "content", "start"]), s)
), max_leaves=8))  # fmt: skip
def test_any_decoder_is_known_or_refused(decoder: Any) -> None:
    with pytest.raises(TokenizerError, match="decodes by"):
        pieces_of_decoder(decoder, "tokenizer.json")


def test_byte_names_of_the_tiny_tokenizers() -> None:
    assert len(NAMES) == 256
