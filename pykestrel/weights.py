"""The weights of one model in memory, as an engine takes them.

Shapes use one alphabet everywhere: N output features, K input features, E experts, G groups
(``ceil(K / 32)``), H hidden_size, F (moe_)intermediate_size, V vocab_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .quant import QTensor

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


@dataclass
class ModelWeights:
    """All weights of a model. `head` is None when it is tied to `embed`."""

    config: ModelConfig
    quant: str  # "bf16" | "q8" | "q4"
    embed: Matrix  # [V, H]
    layers: list[LayerWeights]
    final_norm: F32  # [H]
    head: Matrix | None  # [V, H]


@dataclass(frozen=True)
class Traffic:
    """Bytes of weights as they are stored, whatever form an engine expands them to."""

    weights: int  # of the whole model
    token: int  # that one decoded token must read: of the experts those it is routed to

    @classmethod
    def of(cls, weights: ModelWeights) -> Traffic:
        config, total, token = weights.config, weights.embed.nbytes, 0.0
        for layer in weights.layers:
            shared = sum(getattr(layer, name).nbytes for name in ("q", "k", "v", "o"))
            mlp = sum(getattr(layer, name).nbytes for name in ("gate", "up", "down"))
            total += shared + mlp
            if layer.router is not None:
                mlp *= config.num_experts_per_tok / config.num_experts
            token += shared + mlp
        head = weights.embed if weights.head is None else weights.head
        if weights.head is not None:
            total += head.nbytes
        return cls(total, round(token + head.nbytes))
