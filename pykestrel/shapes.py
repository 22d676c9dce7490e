"""Shapes of well-known models, as their config.json files state them: for measuring the speed of
models that are not there, with random weights."""

from __future__ import annotations

from typing import Any, Final

from .config import ModelConfig
from .errors import UsageError

_QWEN3: Final[dict[str, Any]] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
}
_MOE: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# name: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, tied, and of a
# mixture of experts moe_intermediate_size
_SIZES: Final[dict[str, tuple[int, int, int, int, bool, int]]] = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True, 0),
    "qwen3-1.7b": (2048, 6144, 28, 16, True, 0),
    "qwen3-4b": (2560, 9728, 36, 32, True, 0),
    "qwen3-8b": (4096, 12288, 36, 32, False, 0),
    "qwen3-14b": (5120, 17408, 40, 40, False, 0),
    "qwen3-32b": (5120, 25600, 64, 64, False, 0),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, False, 768),
    "qwen3-235b-a22b": (4096, 12288, 94, 64, False, 1536),
}
NAMES: Final = tuple(_SIZES)


# What the models of 4B and more are documented to take with YaRN, as their cards have it.
_LONG: Final[dict[str, Any]] = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}
_SHORT_ONLY: Final = ("qwen3-0.6b", "qwen3-1.7b")


def config_json(name: str, ctx_size: int = 0) -> dict[str, Any]:
    """The config.json of a named model, with YaRN where ``ctx_size`` is beyond what it has without
    and its card allows that; UsageError lists the names that there are."""
    found = _SIZES.get(name.lower())
    if found is None:
        raise UsageError(f"there is no shape {name!r}; there are {', '.join(NAMES)}")
    hidden, intermediate, layers, heads, tied, experts = found
    values: dict[str, Any] = {
        **_QWEN3,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }
    if ctx_size > values["max_position_embeddings"] and name.lower() not in _SHORT_ONLY:
        values |= _LONG
    if experts:
        values |= {**_MOE, "moe_intermediate_size": experts}
        values |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    return values


def shape(name: str, ctx_size: int = 0) -> ModelConfig:
    """`config_json` as a checked configuration."""
    return ModelConfig.from_dict(config_json(name, ctx_size), f"the shape {name}")


def parameters(config: ModelConfig) -> int:
    """Weights of a model of this configuration; a tied head counts once."""
    from .loading.families import expected_shapes

    total = 0
    for _, _, extents in expected_shapes(config):
        size = 1
        for extent in extents:
            size *= extent
        total += size
    return total
