"""A tokenizer from the metadata of a GGUF file (keys ``tokenizer.ggml.*``).

A GGUF file states the vocabulary and the merges but only the *name* of the rule that splits text
into words. The rules below are those of the models' own tokenizer.json files; a name that is not
here is refused, since another rule would give plausible but wrong ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from .pieces import SPACE_MARK, Pieces
from .tokenizer import MAX_TOKENS, Parts, rust_errors

if TYPE_CHECKING:
    import tokenizers

# Token types of the format.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Name -> (text is NFC-normalized, patterns that split in turn, a whole word that is a token needs
# no merges). "default" is llama.cpp's own rule for a file that names no other.
_RULES: dict[str, tuple[bool, tuple[str, ...], bool]] = {
    "qwen2": (True, (_QWEN2,), False),
    "llama-bpe": (False, (_LLAMA3,), True),
    "gpt-2": (False, (_GPT2,), False),
    # llama.cpp splits off every digit first. No token has a digit beside another character, so the
    # ids differ in white space before a digit only ("\n\n2"); transformers reads the file this way.
    "smollm": (False, (_GPT2,), False),
    "starcoder": (False, (r"\p{N}", _GPT2), False),
    "default": (False, (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"), False),
}
_ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "megrez": "qwen2",
    "refact": "starcoder",
}

_TOKEN_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# Control tokens that end a turn or a text. A GGUF file states one eos id, where the directory it
# was made from lists several in generation_config.json (Qwen: <|im_end|> and <|endoftext|>).
_ENDS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
        "</s>",
    }
)


def byte_level_backend(
    pre: str, vocab: dict[str, int], merges: list[tuple[str, str]]
) -> tokenizers.Tokenizer:
    """A byte-level BPE that splits words by the rule ``pre``; TokenizerError for an unknown one."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = _ALIASES.get(pre, pre)
    if name not in _RULES:
        known = ", ".join(sorted([*_RULES, *_ALIASES]))
        raise TokenizerError(
            f"the tokenizer's word splitting {pre[:60]!r} (tokenizer.ggml.pre) is not supported; "
            f"supported are {known}; run the model with token ids (--prompt-ids)"
        )
    nfc, patterns, ignore_merges = _RULES[name]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def parts_from_gguf(metadata: Mapping[str, Any], where: str) -> Parts:
    """Build the tokenizer; TokenizerError names the key that is missing, damaged or unknown."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise TokenizerError(
            f"{where} has no tokenizer (no tokenizer.ggml.model); run it with token ids "
            "(--prompt-ids)"
        )
    if not isinstance(model, str):
        raise _bad(where, "model", model, "a name")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{where} has a {model[:40]!r} tokenizer (tokenizer.ggml.model); 'gpt2' (byte-level "
            "BPE) and 'llama' (SentencePiece) are supported; run the model with token ids "
            "(--prompt-ids)"
        )
    tokens = _strings(metadata, "tokens", where)
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise _bad(where, "tokens", f"{len(tokens)} tokens", f"1 to {MAX_TOKENS}")
    types = _types(metadata, len(tokens), where)
    vocab = {token: id for id, token in enumerate(tokens) if types[id] != _UNUSED}
    if len(vocab) != len(tokens) - types.count(_UNUSED):
        raise _bad(where, "tokens", "a token twice", "distinct tokens")
    if not vocab:
        raise _bad(where, "tokens", "only unused tokens", "a vocabulary")
    with rust_errors(lambda words: TokenizerError(f"{where} has an unusable tokenizer: {words}")):
        if model == "gpt2":
            backend, pieces, bos_default = _byte_level(metadata, vocab, where)
        else:
            backend, pieces, bos_default = _sentencepiece(metadata, tokens, types, vocab, where)
        _mark_added(backend, tokens, types)
    size = max(vocab.values()) + 1
    control = frozenset(i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN))
    named, ids = _named_tokens(metadata, tokens, types, where)
    prefix = _edge(metadata, "add_bos_token", bos_default, ids.get("bos"), where)
    suffix = _edge(metadata, "add_eos_token", False, ids.get("eos"), where)
    _set_template(backend, tokens, prefix, suffix)
    ends = {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    ends |= {i for i in control if tokens[i] in _ENDS}
    return Parts(
        backend=backend,
        pieces=pieces,
        size=size,
        special_ids=control,
        named=named,
        prefix=prefix,
        suffix=suffix,
        ends=frozenset(ends),
        unused=frozenset(i for i, kind in enumerate(types[:size]) if kind == _UNUSED),
    )


def _byte_level(
    metadata: Mapping[str, Any], vocab: dict[str, int], where: str
) -> tuple[tokenizers.Tokenizer, Pieces, bool]:
    architecture = str(metadata.get("general.architecture", ""))
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None and architecture.startswith(("qwen2", "qwen3")):
        pre = "qwen2"  # the only rule these families ever had
    if pre is None:
        raise TokenizerError(
            f"{where} does not say how its tokenizer splits words (no tokenizer.ggml.pre: a file "
            "of an old converter); use a newer GGUF of the model"
        )
    if not isinstance(pre, str):
        raise _bad(where, "pre", pre, "a name")
    merges: list[tuple[str, str]] = []
    for line in _strings(metadata, "merges", where):
        left, space, right = line[1:].partition(" ")  # the first part has at least one character
        if not space or not right:
            raise _bad(where, "merges", line, "two parts with a space between")
        merges.append((line[0] + left, right))
    backend = byte_level_backend(pre, vocab, merges)
    starts_with_bos = _ALIASES.get(pre, pre) == "llama-bpe"  # unless add_bos_token says otherwise
    return backend, Pieces(byte_level=True), starts_with_bos


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    vocab: dict[str, int],
    where: str,
) -> tuple[tokenizers.Tokenizer, Pieces, bool]:
    """SentencePiece's BPE joins the neighbours whose joined piece scores highest, leftmost first.

    As merges that is: every way to cut a piece in two pieces, best score first, and the longer left
    part first among equals (transformers' conversion). It gave SentencePiece's own ids on all of
    8,000 texts (half of them runs of spaces, signs and emoji) for two vocabularies of 32,000.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    values = [float(s) for s in _listed(scores) if isinstance(s, Real)]
    if len(values) != len(tokens) or any(math.isnan(s) for s in values):
        raise _bad(where, "scores", f"{len(values)} numbers", f"{len(tokens)}, one a token")
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    cuts: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, values, strict=True):
        if kind != _NORMAL or len(token) > 256:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in normal and right in normal:
                cuts.append((score, at, len(token) - at, left, right))
    cuts.sort(key=lambda cut: cut[:3], reverse=True)
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(
            vocab,
            [(left, right) for *_, left, right in cuts],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    space_first = _flag(metadata, "add_space_prefix", True, where)
    steps: list[Any] = [normalizers.Prepend(SPACE_MARK)] if space_first else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if space_first else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, Pieces(byte_level=False, strip_spaces=int(space_first)), True


def _mark_added(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    for wanted, special in ((_CONTROL, True), (_UNKNOWN, True), (_USER_DEFINED, False)):
        found = [t for t, kind in zip(tokens, types, strict=True) if kind == wanted and t]
        added = [AddedToken(t, special=special, normalized=False) for t in found]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _named_tokens(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], where: str
) -> tuple[dict[str, str], dict[str, int]]:
    """Texts for the chat template and ids of the special tokens that the file names."""
    ids: dict[str, int] = {}
    for name, key in (*_TOKEN_KEYS.items(), ("eot", "eot"), ("eom", "eom")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        id = _int(value)
        if id is None or not 0 <= id < len(tokens) or types[id] == _UNUSED:
            raise _bad(where, f"{key}_token_id", value, f"an id below {len(tokens)}")
        ids[name] = id
    return {f"{name}_token": tokens[ids[name]] for name in _TOKEN_KEYS if name in ids}, ids


def _edge(
    metadata: Mapping[str, Any], key: str, default: bool, id: int | None, where: str
) -> tuple[int, ...]:
    wanted = _flag(metadata, key, default, where)
    return (id,) if wanted and id is not None else ()


def _set_template(
    backend: tokenizers.Tokenizer, tokens: list[str], prefix: Iterable[int], suffix: Iterable[int]
) -> None:
    """Give the saved tokenizer.json the same first and last tokens for other programs."""
    from tokenizers import processors

    before, after = [tokens[i] for i in prefix], [tokens[i] for i in suffix]
    used = dict.fromkeys([*before, *after])
    if used:
        pairs = [(token, tokens.index(token)) for token in used]
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=pairs
        )


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        shown = "nothing" if value is None else f"a {type(value).__name__}"
        raise _bad(where, key, shown, "a list of texts")
    return list(value)


def _types(metadata: Mapping[str, Any], count: int, where: str) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [_NORMAL] * count
    types = [_int(v) for v in _listed(value)]
    known = range(_NORMAL, _BYTE + 1)
    checked = [kind for kind in types if kind in known]
    if len(types) != count or len(checked) != count:
        raise _bad(where, "token_type", f"{len(checked)} known types", f"{count}, one a token")
    return [int(kind) for kind in checked if kind is not None]


def _listed(value: Any) -> Iterable[Any]:
    """The elements of an array of the file; none of anything else."""
    is_array = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return value if is_array else ()


def _flag(metadata: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return default
    if value not in (True, False):
        raise _bad(where, key, value, "true or false")
    return bool(value)


def _int(value: Any) -> int | None:
    try:
        return None if isinstance(value, (bool, str, float)) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _bad(where: str, key: str, got: Any, wanted: str) -> TokenizerError:
    shown = got if isinstance(got, str) else ascii(got)
    return TokenizerError(
        f"{where} has tokenizer.ggml.{key} = {shown[:80]} where {wanted} was wanted; download the "
        "file again"
    )


def special_token_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... for a chat template; whatever is damaged is left out."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, (list, tuple)):
        return {}
    found: dict[str, str] = {}
    for name, key in _TOKEN_KEYS.items():
        id = _int(metadata.get(f"tokenizer.ggml.{key}_token_id"))
        if id is not None and 0 <= id < len(tokens) and isinstance(tokens[id], str):
            found[f"{name}_token"] = tokens[id]
    return found
