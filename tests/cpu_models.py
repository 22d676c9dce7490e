"""Random small models, and what a transformer means written down plainly in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pykestrel.config import ModelConfig, RopeConfig
from pykestrel.engine.cpu import CpuEngine
from pykestrel.quant import QTensor, bf16_to_f32, dequantize, f32_to_bf16, quantize
from pykestrel.rope import rope_table
from pykestrel.weights import LayerWeights, Matrix, ModelWeights

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def make_config(**changes: Any) -> ModelConfig:
    layers = changes.get("num_hidden_layers", 2)
    config = ModelConfig(
        model_type="qwen3",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=80,
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope=RopeConfig("default", 10000.0),
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        layer_window=(None,) * layers,
        layer_is_moe=(False,) * layers,
    )
    return replace(config, **changes)


def moe_config(**changes: Any) -> ModelConfig:
    layers = changes.get("num_hidden_layers", 2)
    settings: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "layer_is_moe": (True,) * layers,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    return make_config(**{**settings, **changes})


def make_weights(config: ModelConfig, quant: str = "bf16", seed: int = 0) -> ModelWeights:
    """Random weights that keep activations near 1 and attention far from uniform."""
    c = config
    rng = np.random.default_rng(seed)
    h, q, kv = c.hidden_size, c.q_dim, c.kv_dim

    def matrix(*shape: int) -> Matrix:
        w = (rng.standard_normal(shape) * 1.5 / shape[-1] ** 0.5).astype(np.float32)
        return f32_to_bf16(w) if quant == "bf16" else quantize(w, quant)

    def vector(n: int, wanted: bool = True, around: float = 0.0) -> F32 | None:
        v = (around + 0.3 * rng.standard_normal(n)).astype(np.float32)
        return v if wanted else None

    def norm(n: int) -> F32:
        return (1 + 0.3 * rng.standard_normal(n)).astype(np.float32)

    layers = []
    for is_moe in c.layer_is_moe:
        f = c.moe_intermediate_size if is_moe else c.intermediate_size
        lead = (c.num_experts,) if is_moe else ()
        bias = c.mlp_bias and not is_moe
        layers.append(
            LayerWeights(
                input_norm=norm(h),
                q=matrix(q, h),
                k=matrix(kv, h),
                v=matrix(kv, h),
                o=matrix(h, q),
                post_norm=norm(h),
                gate=matrix(*lead, f, h),
                up=matrix(*lead, f, h),
                down=matrix(*lead, h, f),
                router=(
                    rng.standard_normal((c.num_experts, h)).astype(np.float32) if is_moe else None
                ),
                q_norm=norm(c.head_dim) if c.qk_norm else None,
                k_norm=norm(c.head_dim) if c.qk_norm else None,
                q_bias=vector(q, c.qkv_bias),
                k_bias=vector(kv, c.qkv_bias),
                v_bias=vector(kv, c.qkv_bias),
                o_bias=vector(h, c.o_bias),
                gate_bias=vector(f, bias),
                up_bias=vector(f, bias),
                down_bias=vector(h, bias),
            )
        )
    return ModelWeights(
        config=c,
        quant=quant,
        embed=matrix(c.vocab_size, h),
        layers=layers,
        final_norm=norm(h),
        head=None if c.tie_word_embeddings else matrix(c.vocab_size, h),
    )


def engine_of(weights: ModelWeights, **options: Any) -> CpuEngine:
    """An engine of a copy: it takes over what it gets."""
    options = {"ctx_size": 64, "kv": "f32", **options}
    return CpuEngine(copy.copy(replace(weights, layers=list(weights.layers))), **options)


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    weights: ModelWeights
    ids: list[int]


@st.composite
def cases(draw: st.DrawFn, moe: bool | None = None) -> Case:
    """Any architecture that `ModelConfig` can say, with odd sizes, and a prompt for it."""
    layers = draw(st.integers(1, 3))
    kv_heads = draw(st.integers(1, 3))
    experts = draw(st.integers(1, 6))
    routed = moe if moe is not None else draw(st.booleans())
    config = make_config(
        hidden_size=draw(st.sampled_from([8, 24, 33, 64, 100])),
        intermediate_size=draw(st.sampled_from([7, 32, 50, 520])),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * draw(st.integers(1, 8)),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 6, 16, 32])),
        vocab_size=draw(st.sampled_from([5, 80, 600])),
        tie_word_embeddings=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        layer_window=tuple(draw(st.sampled_from([None, 1, 3, 7, 50])) for _ in range(layers)),
        layer_is_moe=tuple(routed and draw(st.booleans()) for _ in range(layers)),
        num_experts=experts if routed else 0,
        num_experts_per_tok=draw(st.integers(1, experts)) if routed else 0,
        moe_intermediate_size=draw(st.sampled_from([5, 32, 48])) if routed else 0,
        norm_topk_prob=draw(st.booleans()),
    )
    quant = draw(st.sampled_from(["bf16", "q8", "q4"]))
    weights = make_weights(config, quant, draw(st.integers(0, 1000)))
    ids = draw(st.lists(st.integers(0, config.vocab_size - 1), min_size=1, max_size=20))
    return Case(config, weights, ids)


# ---- the meaning, one token and one head at a time


def values(matrix: Matrix) -> F64:
    f32 = dequantize(matrix) if isinstance(matrix, QTensor) else bf16_to_f32(matrix)
    return f32.astype(np.float64)


def plain_norm(x: F64, weight: F32, eps: float) -> F64:
    return x / np.sqrt((x * x).mean() + eps) * weight


def plain_silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def plain_softmax(x: F64) -> F64:
    e = np.exp(x - x.max())
    return e / e.sum()


def plain_mlp(x: F64, layer: LayerWeights) -> F64:
    gate, up = values(layer.gate) @ x, values(layer.up) @ x
    if layer.gate_bias is not None and layer.up_bias is not None:
        gate, up = gate + layer.gate_bias, up + layer.up_bias
    y = values(layer.down) @ (plain_silu(gate) * up)
    return y if layer.down_bias is None else y + layer.down_bias


def plain_moe(x: F64, layer: LayerWeights, config: ModelConfig) -> F64:
    assert layer.router is not None
    p = plain_softmax(layer.router.astype(np.float64) @ x)
    chosen = sorted(range(len(p)), key=lambda e: (-p[e], e))[: config.num_experts_per_tok]
    share = sum(p[e] for e in chosen) if config.norm_topk_prob else 1.0
    y = np.zeros_like(x)
    gate, up, down = values(layer.gate), values(layer.up), values(layer.down)
    for e in chosen:
        y += p[e] / share * (down[e] @ (plain_silu(gate[e] @ x) * (up[e] @ x)))
    return y


def plain_rotate(x: F64, cos: F32, sin: F32) -> F64:
    half = len(x) // 2
    a, b = x[:half], x[half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def plain_logits(weights: ModelWeights, ids: list[int]) -> F64:
    """``[len(ids), V]``: every token through every layer, with every key there is before it."""
    c = weights.config
    cos, sin = rope_table(c, len(ids))
    embed = values(weights.embed)
    head = embed if weights.head is None else values(weights.head)
    keys: list[list[F64]] = [[] for _ in weights.layers]
    vals: list[list[F64]] = [[] for _ in weights.layers]
    out = []
    for p, token in enumerate(ids):
        x = embed[token]
        for i, layer in enumerate(weights.layers):
            n = plain_norm(x, layer.input_norm, c.rms_norm_eps)
            q, k, v = values(layer.q) @ n, values(layer.k) @ n, values(layer.v) @ n
            if layer.q_bias is not None:
                q, k, v = q + layer.q_bias, k + layer.k_bias, v + layer.v_bias
            qs, ks = q.reshape(-1, c.head_dim), k.reshape(-1, c.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qs = np.stack([plain_norm(h, layer.q_norm, c.rms_norm_eps) for h in qs])
                ks = np.stack([plain_norm(h, layer.k_norm, c.rms_norm_eps) for h in ks])
            qs = np.stack([plain_rotate(h, cos[p], sin[p]) for h in qs])
            keys[i].append(np.stack([plain_rotate(h, cos[p], sin[p]) for h in ks]))
            vals[i].append(v.reshape(-1, c.head_dim))
            window = c.layer_window[i]
            seen = [j for j in range(p + 1) if window is None or p - j < window]
            heads = []
            for h, query in enumerate(qs):
                g = h // (c.num_attention_heads // c.num_key_value_heads)
                scores = np.array([query @ keys[i][j][g] for j in seen]) / np.sqrt(c.head_dim)
                weight = plain_softmax(scores)
                heads.append(sum(w * vals[i][j][g] for w, j in zip(weight, seen, strict=True)))
            y = values(layer.o) @ np.concatenate(heads)
            x = x + (y if layer.o_bias is None else y + layer.o_bias)
            n = plain_norm(x, layer.post_norm, c.rms_norm_eps)
            x = x + (plain_mlp(n, layer) if layer.router is None else plain_moe(n, layer, c))
        out.append(head @ plain_norm(x, weights.final_norm, c.rms_norm_eps))
    return np.stack(out)
