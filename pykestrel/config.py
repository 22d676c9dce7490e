"""What a model is: the hyperparameters of ``config.json``, checked and frozen.

Field names equal the keys of ``config.json``. Dense and mixture-of-experts models, with and
without q/k norm and biases, are one `ModelConfig` with a few switches, never two classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters (`rope_scaling` and `rope_parameters` end up here alike)."""

    rope_type: str  # "default" | "linear" | "llama3" | "yarn"
    rope_theta: float
    factor: float = 1.0
    original_max_position_embeddings: int | None = None  # llama3, yarn
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    attention_factor: float | None = None  # yarn; None: 0.1 * ln(factor) + 1
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of one forward pass."""

    model_type: str  # as in the file: qwen3, qwen3_moe, qwen3_vl, qwen3_vl_moe, qwen2, llama
    hidden_size: int
    intermediate_size: int  # of a dense MLP
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    qk_norm: bool  # RMSNorm over head_dim of every q and k head, before RoPE
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    layer_window: tuple[int | None, ...]  # sliding window of each layer; None: full attention
    layer_is_moe: tuple[bool, ...]
    num_experts: int = 0  # 0: a dense model
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], where: str) -> ModelConfig:
        """The checked content of a ``config.json``; ``where`` names it in messages.

        Raises ModelError for anything that is missing, of the wrong type, out of range, or a
        setting that would change the arithmetic and is not known here.
        """
        from .loading.settings import parse_config

        return parse_config(d, where)

    @property
    def q_dim(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_key_value_heads * self.head_dim
