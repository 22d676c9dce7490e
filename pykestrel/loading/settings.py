"""config.json to `ModelConfig`: every setting is understood, known to be harmless, or refused.

One rule: a setting that would change the arithmetic and that this version does not implement is
refused by name. Defaults are those of the `transformers` configuration classes, and only where
they cannot silently give a wrong model (a missing rope_theta can).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..errors import ModelError
from .fields import LIMITS, Fields
from .jsonfile import kind_of, shown
from .rope_settings import RopeParser


@dataclass(frozen=True)
class Family:
    """The switches of one `model_type`, as the modelling code of transformers sets them."""

    architectures: tuple[str, ...]  # the classes that are this forward pass with its head
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the key attention_bias says
    o_bias: bool | None = None  # None: the key attention_bias says
    mlp_bias: bool = False  # the key mlp_bias is honoured
    experts: bool = False
    topk_always_normed: bool = False  # the modelling code has no norm_topk_prob switch
    window: str = "none"  # "none" | "layers" (layer_types, max_window_layers) | "all"
    text_config: str | None = None  # model_type of the nested text_config
    theta: float | None = None  # of a file without rope_theta; None: refused
    head_dim: int | None = None  # of a file without it; None: hidden_size / num_attention_heads


FAMILIES: dict[str, Family] = {
    # LlamaConfig had no rope_theta before transformers 4.31: in those files it is 10000.
    "llama": Family(("LlamaForCausalLM",), mlp_bias=True, theta=10000.0),
    "qwen2": Family(("Qwen2ForCausalLM",), qkv_bias=True, o_bias=False, window="layers"),
    "qwen3": Family(("Qwen3ForCausalLM",), qk_norm=True, window="layers", head_dim=128),
    "qwen3_moe": Family(("Qwen3MoeForCausalLM",), qk_norm=True, experts=True, window="all"),
    "qwen3_vl": Family(
        ("Qwen3VLForConditionalGeneration",),
        qk_norm=True,
        text_config="qwen3_vl_text",
        head_dim=128,
    ),
    "qwen3_vl_moe": Family(
        ("Qwen3VLMoeForConditionalGeneration",),
        qk_norm=True,
        experts=True,
        topk_always_normed=True,
        text_config="qwen3_vl_moe_text",
    ),
}


def parse_config(d: Mapping[str, Any], where: str) -> ModelConfig:
    """See `ModelConfig.from_dict`."""
    if not isinstance(d, Mapping):
        raise ModelError(f"{where} holds a JSON {kind_of(d)}; an object was wanted")
    top = Fields(d, where)
    model_type = top.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        top.fail("model_type", f"supported are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    _check_architecture(top, family)
    _check_quantization(top)
    text = top
    if family.text_config is not None:
        inner = top.mapping("text_config")
        if inner is None:
            top.fail("text_config", f"the text model of a {model_type} was wanted there")
        text = Fields(inner, f"{where}, text_config")
        if text.get("model_type") not in (None, family.text_config):
            text.fail("model_type", f"{family.text_config} was wanted")
        _check_quantization(text)
    config = _parse_text(text, top, model_type, family)
    for fields in (text, top):
        fields.refuse_unknown(model_type)
    return config


def _parse_text(f: Fields, top: Fields, model_type: str, family: Family) -> ModelConfig:
    if f.get("hidden_act") not in (None, "silu", "swish"):
        f.fail("hidden_act", "silu was wanted (no other activation is implemented)")
    for key in ("is_encoder_decoder", "add_cross_attention"):
        if f.boolean(key, False):
            f.fail(key, "only decoders are supported")
    hidden = f.integer("hidden_size")
    layers = f.integer("num_hidden_layers")
    heads = f.integer("num_attention_heads")
    # one K/V head a query head before grouped queries came: what LlamaConfig does without the key
    kv_heads = f.integer("num_key_value_heads", heads if model_type == "llama" else None)
    if heads % kv_heads:
        f.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads} was wanted")
    if f.get("head_dim") is None and family.head_dim is None and hidden % heads:
        f.fail("head_dim", f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = f.integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{f.where}: head_dim is {head_dim}; rotary embeddings want an even one")
    attention_bias = f.boolean("attention_bias", False)
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    # Qwen3-Coder states these two; the modelling code does not look at them.
    for key, fixed in (("use_qk_norm", family.qk_norm), ("qkv_bias", qkv_bias)):
        if f.boolean(key, fixed) is not fixed:
            f.fail(key, f"{str(fixed).lower()} was wanted for {model_type}")
    moe = _parse_experts(f, family, layers)
    max_positions = f.integer("max_position_embeddings")
    bos = f.get("bos_token_id")
    if bos is None:
        bos = top.get("bos_token_id")
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden,
        # a model whose every layer has experts has no dense MLP to give the size of
        intermediate_size=f.integer("intermediate_size", 0 if all(moe.layers) else None, lo=0),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=f.integer("vocab_size"),
        rms_norm_eps=f.number("rms_norm_eps"),
        max_position_embeddings=max_positions,
        tie_word_embeddings=_parse_tie(f, top),
        rope=RopeParser(
            f,
            max_positions,
            _used_layer_types(f, layers),
            mrope=family.text_config is not None,
            default_theta=family.theta,
        ).parse(),
        qk_norm=family.qk_norm,
        qkv_bias=qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.mlp_bias and f.boolean("mlp_bias", False),
        layer_window=_parse_windows(f, family, layers),
        layer_is_moe=moe.layers,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.per_token,
        moe_intermediate_size=moe.size,
        norm_topk_prob=moe.normed,
        bos_token_id=bos if type(bos) is int and 0 <= bos < 1 << 31 else None,
        eos_token_ids=_parse_eos(f, top),
    )


def _check_architecture(f: Fields, family: Family) -> None:
    names = f.sequence("architectures")
    if names and not any(name in family.architectures for name in names):
        f.fail("architectures", f"{' or '.join(family.architectures)} was wanted")


def _check_quantization(f: Fields) -> None:
    for key in ("quantization_config", "compression_config", "quantization"):
        value = f.mapping(key)
        if not value:
            continue
        method = value.get("quant_method", value.get("quant_algo"))
        if key == "quantization_config" and method == "pykestrel":
            continue
        name = (
            f"a method without a name (keys {shown([*value])})" if method is None else shown(method)
        )
        raise ModelError(
            f"{f.where}: {key} says that the weights are quantised by {name}, which is not "
            "supported; use the original model and let pykestrel quantise it (q8, q4)"
        )


def _parse_tie(f: Fields, top: Fields) -> bool:
    """The outer value counts, as in transformers; every supported family is untied by default."""
    inner = f.boolean("tie_word_embeddings", False)
    return top.boolean("tie_word_embeddings", inner)


def _parse_eos(f: Fields, top: Fields) -> tuple[int, ...]:
    value = f.get("eos_token_id")
    if value is None:
        f, value = top, top.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > 1000 or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        f.fail("eos_token_id", "a token id or a list of token ids was wanted")
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class _Experts:
    layers: tuple[bool, ...]
    num_experts: int = 0
    per_token: int = 0
    size: int = 0
    normed: bool = False


def _parse_experts(f: Fields, family: Family, layers: int) -> _Experts:
    dense = _Experts((False,) * layers)
    if not family.experts:
        return dense
    a, b = f.get("num_experts"), f.get("num_local_experts")
    if a is not None and b is not None and a != b:
        f.fail("num_experts", f"num_local_experts is {shown(b)}, and the two must be equal")
    key = "num_local_experts" if a is None and b is not None else "num_experts"
    count = f.integer(key, lo=0, hi=LIMITS["num_experts"])
    step = f.integer("decoder_sparse_step", 1, hi=LIMITS["num_hidden_layers"])
    dense_layers = f.sequence("mlp_only_layers") or []
    if not all(type(i) is int and 0 <= i < layers for i in dense_layers):
        f.fail("mlp_only_layers", f"a list of layer numbers below {layers} was wanted")
    without = set(dense_layers)
    is_moe = tuple(count > 0 and i not in without and (i + 1) % step == 0 for i in range(layers))
    normed = f.boolean("norm_topk_prob", family.topk_always_normed)
    if family.topk_always_normed and not normed:
        f.fail("norm_topk_prob", "true was wanted: transformers always normalises for this model")
    if not any(is_moe):
        for unused in ("num_experts_per_tok", "moe_intermediate_size"):
            f.get(unused)
        return dense
    per_token = f.integer("num_experts_per_tok", hi=count)
    return _Experts(is_moe, count, per_token, f.integer("moe_intermediate_size"), normed)


def _used_layer_types(f: Fields, layers: int) -> list[str]:
    """`layer_types`, checked; empty when it is not given."""
    types = f.sequence("layer_types")
    if types is None:
        return []
    if len(types) != layers:
        raise ModelError(
            f"{f.where}: layer_types has {len(types)} entries; one for each of the "
            f"{layers} layers was wanted"
        )
    for i, name in enumerate(types):
        if name not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"{f.where}: layer_types[{i}] is {shown(name)}; full_attention or "
                "sliding_attention was wanted"
            )
    return types


def _parse_windows(f: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """The window of each layer: a query sees that many positions, itself among them."""
    types = _used_layer_types(f, layers)
    f.get("sliding_window")
    first = f.integer("max_window_layers", 28, lo=0)  # the default of Qwen2Config and Qwen3Config
    if not f.boolean("use_sliding_window", False) or f.get("sliding_window") is None:
        if "sliding_attention" in types:
            f.fail("layer_types", "sliding_attention needs use_sliding_window and sliding_window")
        return (None,) * layers
    window = f.integer("sliding_window")
    if family.window == "none":
        f.fail("use_sliding_window", "this model type has no sliding window in transformers")
    if family.window == "all":
        # Qwen3MoeModel builds one mask for all layers, whatever max_window_layers says
        if types and set(types) != {"sliding_attention"}:
            f.fail("layer_types", "use_sliding_window makes every layer of this type slide")
        return (window,) * layers
    if types:
        return tuple(window if t == "sliding_attention" else None for t in types)
    return tuple(window if i >= first else None for i in range(layers))
