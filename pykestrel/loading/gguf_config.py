"""The metadata of a GGUF file, said in the words of config.json.

So that one parser checks both. Keys that have no meaning here keep their own name and are
refused there by that name, unless they are switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelError
from .jsonfile import shown
from .tensors import read_f32

if TYPE_CHECKING:
    from .gguf_file import GGUFFile

# The text towers of the vision models are the text models: mrope is the plain rotation for text,
# and deepstack only adds at image positions.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
}
_KEYS = {  # below "{architecture}."
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
_ROPE_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Keys whose other values would change the arithmetic, and the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "use_parallel_residual": (False,),
}
_VISION_KEYS = ("rope.dimension_sections", "n_deepstack_layers")


def config_dict(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say. ModelError for an architecture that is not supported."""
    meta, tensors, path = file.metadata, file.tensors, file.path
    arch = meta.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ModelError(
            f"{path}: general.architecture is {shown(arch)}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    d: dict[str, Any] = {"model_type": ARCHITECTURES[arch], "hidden_act": "silu"}
    rope: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for full, value in meta.items():
        if not full.startswith(arch + "."):
            continue
        key = full[len(arch) + 1 :]
        if key in _KEYS:
            d[_KEYS[key]] = _one_value(value)
        elif key in _ROPE_KEYS:
            rope[_ROPE_KEYS[key]] = value
        elif key in _NEUTRAL:
            if not any(value == v for v in _NEUTRAL[key]):
                raise ModelError(
                    f"{path}: {full} is {shown(value)}; {_NEUTRAL[key][0]} was wanted (nothing "
                    "else is implemented)"
                )
        elif not (key in _VISION_KEYS and "vl" in arch):
            left[key] = value
    embed = tensors.get("token_embd.weight")
    if embed is not None and len(embed.shape) == 2:
        d.setdefault("vocab_size", embed.shape[0])
    heads, hidden = d.get("num_attention_heads"), d.get("hidden_size")
    if "head_dim" not in d and type(heads) is int and type(hidden) is int and heads > 0:
        d["head_dim"] = hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        # a part of a head that is not rotated, or values of another width, are not implemented
        if key in left and left[key] == d.get("head_dim"):
            del left[key]
    if d["model_type"] == "qwen3_moe":
        d.setdefault("norm_topk_prob", True)  # as llama.cpp does for this architecture
    d["tie_word_embeddings"] = "output.weight" not in tensors
    d["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if d["model_type"] == "llama":
        d["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if rope.get("rope_type") == "none" or not rope.get("factor"):
        rope = {}
    elif "rope_type" not in rope:
        rope["rope_type"] = "linear"  # what a factor without a type means to llama.cpp
    factors = tensors.get("rope_freqs.weight")
    if factors is not None:
        rope = _from_factors(file, d, rope)
    if rope:
        d["rope_scaling"] = rope
    ids = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    d["eos_token_id"] = list(dict.fromkeys(i for i in ids if i is not None))
    d["bos_token_id"] = meta.get("tokenizer.ggml.bos_token_id")
    d.update({f"{arch}.{key}": value for key, value in left.items()})
    return d


def _one_value(value: Any) -> Any:
    """Some files give one value a layer; if all are equal it is one value."""
    if isinstance(value, list) and value and all(v == value[0] for v in value):
        return value[0]
    return value


def _from_factors(file: GGUFFile, d: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_freqs.weight` (the converter's form of llama3 rope) as the parameters it came from.

    The tensor holds the divisor of each frequency: 1 for the fast ones, `factor` for the slow
    ones, a smooth change between. Every published model was made with low_freq_factor 1,
    high_freq_factor 4 and 8192 positions; the divisors are computed from these and must agree.
    """
    info = file.tensors["rope_freqs.weight"]
    theta, head_dim = d.get("rope_theta", 10000.0), d.get("head_dim")
    refuse = ModelError(
        f"{file.path}: rope_freqs.weight holds frequency factors that are not those of llama3 "
        "rope scaling, and others are not implemented"
    )
    if rope or type(head_dim) is not int or info.shape != (head_dim // 2,):
        raise refuse
    if type(theta) not in (int, float) or not theta > 0:
        raise refuse
    given = read_f32(info, 0, 1).reshape(-1).astype(np.float64)
    if np.all(given == 1.0):
        return {}
    factor = float(given.max())
    low, high, original = 1.0, 4.0, 8192
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    wanted = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(given, wanted, rtol=1e-4, atol=0):
        raise refuse
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
