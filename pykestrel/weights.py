"""The weights of one model in memory, as an engine takes them.

Shapes use one alphabet everywhere: N output features, K input features, E experts, G groups
(``ceil(K / 32)``), H hidden_size, F (moe_)intermediate_size, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .quant import QTensor, quantized_bytes

F32: TypeAlias = NDArray[np.float32]
BF16: TypeAlias = NDArray[np.uint16]  # bit patterns: NumPy has no bfloat16

# A matrix is either bf16 bits [..., N, K] or a QTensor of the same logical shape.
Matrix: TypeAlias = "BF16 | QTensor"


@dataclass
class LayerWeights:
    """One decoder layer. `gate/up/down` hold the dense MLP, or the expert stacks [E, N, K]."""

    input_norm: F32  # [H]
    q: Matrix  # [q_dim, H]
    k: Matrix  # [kv_dim, H]
    v: Matrix  # [kv_dim, H]
    o: Matrix  # [H, q_dim]
    post_norm: F32  # [H]
    gate: Matrix  # [F, H] or [E, F, H]
    up: Matrix  # [F, H] or [E, F, H]
    down: Matrix  # [H, F] or [E, H, F]
    router: F32 | None = None  # [E, H]; None: the layer is dense
    q_norm: F32 | None = None  # [head_dim]
    k_norm: F32 | None = None  # [head_dim]
    q_bias: F32 | None = None  # [q_dim]
    k_bias: F32 | None = None  # [kv_dim]
    v_bias: F32 | None = None  # [kv_dim]
    o_bias: F32 | None = None  # [H]
    gate_bias: F32 | None = None  # [F]
    up_bias: F32 | None = None  # [F]
    down_bias: F32 | None = None  # [H]


class Layers(Protocol):
    """Layers to be taken, each once."""

    def pop(self, index: int, /) -> LayerWeights: ...


@dataclass
class ModelWeights:
    """All weights of a model. `head` is None when it is tied to `embed`."""

    config: ModelConfig
    quant: str  # "bf16" | "q8" | "q4"
    embed: Matrix  # [V, H]
    layers: Layers  # a list, or a reader that has none of them in memory
    final_norm: F32  # [H]
    head: Matrix | None  # [V, H]


@dataclass(frozen=True)
class Traffic:
    """Bytes of matrices as they are stored, whatever form an engine expands them to; routers are
    float32."""

    weights: int  # of the whole model
    token: int  # that one decoded token must read: of the experts those it is routed to

    @classmethod
    def of(cls, config: ModelConfig, quant: str) -> Traffic:
        c, h = config, config.hidden_size
        vocabulary = quantized_bytes((c.vocab_size, h), quant)
        shared = quantized_bytes((c.q_dim + 2 * c.kv_dim, h), quant)
        shared += quantized_bytes((h, c.q_dim), quant)
        total, token = vocabulary, float(vocabulary)
        for moe in c.layer_is_moe:
            f = c.moe_intermediate_size if moe else c.intermediate_size
            mlp = quantized_bytes((2 * f, h), quant) + quantized_bytes((h, f), quant)
            always = shared + (4 * c.num_experts * h if moe else 0)
            total += always + mlp * (c.num_experts if moe else 1)
            token += always + mlp * (c.num_experts_per_tok if moe else 1)
        if not c.tie_word_embeddings:
            total += vocabulary
        return cls(total, round(token))
