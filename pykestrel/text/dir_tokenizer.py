"""The tokenizer of a model directory: tokenizer.json and the settings around it.

The files come from strangers: everything that is used is checked first, since the library below
answers some damaged files with a panic and others with a quietly different tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from .pieces import pieces_of_decoder
from .tokenizer import MAX_TOKENS, Parts, TextSource, rust_errors

if TYPE_CHECKING:
    import tokenizers

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_HINT = "download the model again, or run it with token ids (--prompt-ids)"


def parts_from_dir(source: TextSource) -> Parts:
    """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json.

    Raises TokenizerError in one sentence when the tokenizer is missing, damaged or of a kind that
    is not supported.
    """
    config = _object(source, "tokenizer_config.json")
    text = source.read_text("tokenizer.json")
    if text is None:
        where = f"{source.path}/vocab.json"
        text = _from_vocab(source, config, where)
    else:
        where = f"{source.path}/tokenizer.json"
    spec = _parse(text, where)
    _check_model(spec, where)
    pieces = pieces_of_decoder(spec.get("decoder"), where)
    size = _check_ids(spec, where)
    prefix, suffix = _template_ids(spec.get("post_processor"), where)
    outside = next((id for id in (*prefix, *suffix) if id >= size), None)
    if outside is not None:
        raise _bad(where, "post_processor: an id", outside, f"one of the {size} tokens")

    from tokenizers import Tokenizer as Backend

    with rust_errors(lambda words: TokenizerError(f"{where} cannot be used: {words}; {_HINT}")):
        backend = Backend.from_str(text)
        backend.no_truncation()  # a limit in the file would cut a prompt silently
        backend.no_padding()
    for token in spec.get("added_tokens") or ():
        _same_id(backend, token["content"], token["id"], where)

    extra = _added_tokens(source, config)
    size = max([size, *(id + 1 for id in extra)])
    _add_missing(backend, extra, str(source.path))
    special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    for id, token in extra.items():  # tokenizer_config.json has the last word, as in transformers
        (special.add if token["special"] else special.discard)(id)

    named = named_tokens(config, _object(source, "special_tokens_map.json"))
    prefix = _stated(config, "add_bos_token", "bos_token", named, backend, prefix)
    suffix = _stated(config, "add_eos_token", "eos_token", named, backend, suffix)
    return Parts(backend, pieces, size, frozenset(special), named, prefix, suffix)


def _object(source: TextSource, name: str) -> Mapping[str, Any]:
    value = source.read_json(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TokenizerError(
            f"{source.path}/{name} holds a {type(value).__name__} where an object was wanted; "
            f"{_HINT}"
        )
    return value


def _parse(text: str, where: str) -> Mapping[str, Any]:
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        words = getattr(error, "msg", None) or type(error).__name__
        line = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise TokenizerError(f"{where} is not valid JSON{line}: {words}; {_HINT}") from None
    if not isinstance(spec, Mapping):
        raise _bad(where, "the file", spec, "an object")
    return spec


def _check_model(spec: Mapping[str, Any], where: str) -> None:
    model = spec.get("model")
    if not isinstance(model, Mapping):
        raise _bad(where, "model", model, "an object")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind not in ("BPE", "Unigram"):
        raise _bad(where, "model.type", kind, 'a supported kind ("BPE" or "Unigram")')
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):  # "##" and "</w>": no supported family uses them
            raise _bad(where, f"model.{key}", model[key], "none (not supported)")
    if kind == "BPE" and not isinstance(model.get("merges"), list):
        raise _bad(where, "model.merges", model.get("merges"), "a list")


def _check_ids(spec: Mapping[str, Any], where: str) -> int:
    """Largest id + 1, once every id is known to be a distinct, sane number."""
    vocab = spec["model"].get("vocab")
    if isinstance(vocab, list):  # Unigram: [[piece, score], ...], ids by position
        ids: list[Any] = list(range(len(vocab)))
    elif isinstance(vocab, Mapping):
        ids = list(vocab.values())
    else:
        raise _bad(where, "model.vocab", vocab, "an object of token: id")
    added = spec.get("added_tokens")
    if added is not None and not isinstance(added, list):
        raise _bad(where, "added_tokens", added, "a list")
    for n, token in enumerate(added or ()):
        if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            raise _bad(where, f"added_tokens[{n}]", token, "an object with id and content")
        if not _is_id(token.get("id")):
            raise _bad(where, f"added_tokens[{n}].id", token.get("id"), _IDS)
    # a vocabulary is large: one look at all of them, and at each only when something is wrong
    if {*map(type, ids)} - {int} or (ids and not (_is_id(min(ids)) and _is_id(max(ids)))):
        wrong = next(i for i in ids if not _is_id(i))
        raise _bad(where, "model.vocab: an id", wrong, _IDS)
    if len(set(ids)) != len(ids):
        raise TokenizerError(f"{where} gives two tokens of model.vocab the same id; {_HINT}")
    if not ids:
        raise _bad(where, "model.vocab", vocab, "at least one token")
    return 1 + max(int(id) for id in (*ids, *(token["id"] for token in added or ())))


_IDS = f"an id from 0 to {MAX_TOKENS - 1}"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_TOKENS


def _bad(where: str, what: str, got: Any, wanted: str) -> TokenizerError:
    shown = ascii(got) if not isinstance(got, (list, dict)) else f"a {type(got).__name__}"
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return TokenizerError(f"{where} has {what} = {shown} where {wanted} was wanted; {_HINT}")


def _same_id(backend: tokenizers.Tokenizer, content: str, id: int, where: str) -> None:
    found = backend.token_to_id(content)
    if found != id:
        raise TokenizerError(
            f"{where} gives the added token {content[:60]!r} the id {id}, but by its place it is "
            f"{'absent' if found is None else found}; {_HINT}"
        )


def _added_tokens(source: TextSource, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Added tokens that tokenizer_config.json or the older added_tokens.json lists, by id."""
    found: dict[int, dict[str, Any]] = {}
    where = f"{source.path}/tokenizer_config.json"
    listed = config.get("added_tokens_decoder")
    if listed is not None and not isinstance(listed, Mapping):
        raise _bad(where, "added_tokens_decoder", listed, "an object of id: token")
    for key, token in (listed or {}).items():
        id = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else None
        if not _is_id(id) or id is None:
            raise _bad(where, "added_tokens_decoder: a key", key, _IDS)
        if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            raise _bad(where, f"added_tokens_decoder[{key}]", token, "an object with content")
        flags = {k: bool(token.get(k)) for k in ("lstrip", "rstrip", "single_word", "special")}
        normalized = token.get("normalized", not flags["special"])
        found[id] = {"content": token["content"], "normalized": bool(normalized), **flags}
    if not found:
        for content, id in _object(source, "added_tokens.json").items():
            if not _is_id(id):
                raise _bad(f"{source.path}/added_tokens.json", content[:40], id, _IDS)
            found[id] = {"content": content, "normalized": False, "special": False}
    return found


def _add_missing(
    backend: tokenizers.Tokenizer, extra: Mapping[int, Mapping[str, Any]], where: str
) -> None:
    from tokenizers import AddedToken

    there = backend.get_added_tokens_decoder()
    for id, token in sorted(extra.items()):
        if id not in there and token["content"]:
            with rust_errors(lambda words: TokenizerError(f"{where}: {words}; {_HINT}")):
                backend.add_tokens([AddedToken(**token)])
        if token["content"]:
            _same_id(backend, token["content"], id, where)


def named_tokens(config: Mapping[str, Any], token_map: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as strings; older files write them as objects with content."""
    named: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config[name] if name in config else token_map.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str) and value:
            named[name] = value
        elif value is not None and value != "":
            raise _bad("tokenizer_config.json", name, value, "a token's text")
    return named


def _stated(
    config: Mapping[str, Any],
    key: str,
    name: str,
    named: Mapping[str, str],
    backend: tokenizers.Tokenizer,
    ids: tuple[int, ...],
) -> tuple[int, ...]:
    """``ids`` with the token of ``name`` put in or taken out as ``key`` says, if it is there."""
    stated = config.get(key)
    if stated is None:
        return ids
    if not isinstance(stated, bool):
        raise _bad("tokenizer_config.json", key, stated, "true or false")
    token = backend.token_to_id(named[name]) if name in named else None
    if not stated:
        return tuple(i for i in ids if i != token)
    if token is None:
        raise TokenizerError(
            f"tokenizer_config.json has {key} = true, but {name} is "
            f"{named.get(name)!r}, which is no token; {_HINT}"
        )
    return ids if token in ids else (token, *ids) if key == "add_bos_token" else (*ids, token)


def _template_ids(processor: Any, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a tokenizer.json's ``post_processor`` puts before and after one text."""
    if processor is None:
        return (), ()
    kind = processor.get("type") if isinstance(processor, Mapping) else None
    if kind == "ByteLevel":  # moves offsets only
        return (), ()
    if kind == "Sequence" and isinstance(processor.get("processors"), list):
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        for inner in processor["processors"]:
            if isinstance(inner, Mapping) and inner.get("type") == "Sequence":
                raise _bad(where, "post_processor: a step", "Sequence", "a plain step")
            left, right = _template_ids(inner, where)
            before, after = (*left, *before), (*after, *right)
        return before, after
    if kind in ("BertProcessing", "RobertaProcessing"):
        ids = [_pair_id(processor.get(key), where) for key in ("cls", "sep")]
        return (ids[0],), (ids[1],)
    if kind == "TemplateProcessing":
        return _single(processor, where)
    raise _bad(where, "post_processor.type", kind, "ByteLevel or TemplateProcessing")


def _pair_id(pair: Any, where: str) -> int:
    if isinstance(pair, list) and len(pair) == 2 and _is_id(pair[1]):
        return int(pair[1])
    raise _bad(where, "post_processor: a token", pair, "a pair of text and id")


def _single(processor: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    known = processor.get("special_tokens")
    steps = processor.get("single")
    if not isinstance(known, Mapping) or not isinstance(steps, list):
        raise _bad(where, "post_processor", processor, "a template with single, special_tokens")
    before: list[int] = []
    after: list[int] = []
    side = before
    for step in steps:
        if isinstance(step, Mapping) and "Sequence" in step and side is before:
            side = after
            continue
        token = step.get("SpecialToken") if isinstance(step, Mapping) else None
        name = token.get("id") if isinstance(token, Mapping) else None
        entry = known.get(name) if isinstance(name, str) else None
        ids = entry.get("ids") if isinstance(entry, Mapping) else None
        if not isinstance(ids, list) or not ids or not all(_is_id(i) for i in ids):
            raise _bad(where, "post_processor.single: a step", step, "one text or a known token")
        side.extend(ids)
    if side is before:
        raise _bad(where, "post_processor.single", steps, "a template with the text in it")
    return tuple(before), tuple(after)


def _from_vocab(source: TextSource, config: Mapping[str, Any], where: str) -> str:
    """A tokenizer.json made of vocab.json and merges.txt, for the families whose way of splitting
    words is known; TokenizerError names what is missing otherwise."""
    from .gguf_tokenizer import byte_level_backend

    merges = source.read_text("merges.txt")
    vocab = source.read_json("vocab.json")
    if merges is None or vocab is None:
        also = ""
        if (source.path / "tokenizer.model").exists():
            also = " (tokenizer.model alone is not read: convert it with transformers)"
        raise TokenizerError(f"{source.path} has no tokenizer.json{also}; {_HINT}")
    families = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if name not in families:
        raise TokenizerError(
            f"{source.path} has vocab.json and merges.txt but no tokenizer.json, and its "
            f"tokenizer_class {name[:40] or 'none'!r} is not one of {', '.join(families)}: how it "
            "splits words is not known; make a tokenizer.json with transformers"
        )
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    pairs = [tuple(line.split(" ")) for line in lines]
    if not all(len(pair) == 2 for pair in pairs):
        raise TokenizerError(f"{source.path}/merges.txt has a line that is not two parts; {_HINT}")
    with rust_errors(lambda words: TokenizerError(f"{where} cannot be used: {words}; {_HINT}")):
        return byte_level_backend(
            families[name], dict(vocab), [(left, right) for left, right in pairs]
        ).to_str()
