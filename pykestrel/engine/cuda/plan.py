"""What of a model lies where on a device, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...config import ModelConfig
from ...errors import UsageError
from ...native.decode import DecodeConfig, Layer, decode_size
from ...native.weights import HEAD_LAYER, Matrix, Proj, cache_size, wkey
from ...quant import GROUP

F32: TypeAlias = NDArray[np.float32]

# What CUDA takes besides on its way: rounding of 2 MB an allocation, staging, captured graphs.
_MARGIN: Final = 256 << 20

PREFILL_ROWS: Final = 2048  # tokens of a prompt that are computed together


@dataclass(frozen=True)
class Entry:
    """One entry of the weight cache."""

    layer: int
    proj: Proj
    matrix: Matrix

    @property
    def key(self) -> int:
        return wkey(self.layer, self.proj)


def entries(config: ModelConfig, quant: str) -> list[Entry]:
    """Every entry of a model, in the order in which a token reads them."""
    c, h = config, config.hidden_size
    qkv = c.q_dim + 2 * c.kv_dim
    found = [Entry(HEAD_LAYER, Proj.EMBED, Matrix(quant, 1, c.vocab_size, h))]
    for i, moe in enumerate(c.layer_is_moe):
        found.append(Entry(i, Proj.FUSED_QKV, Matrix(quant, 1, qkv, h)))
        found.append(Entry(i, Proj.O, Matrix(quant, 1, h, c.q_dim)))
        if moe:
            e, f = c.num_experts, c.moe_intermediate_size
            found.append(Entry(i, Proj.ROUTER, Matrix("f32", 1, e, h)))
            found.append(Entry(i, Proj.GATE, Matrix(quant, e, f, h)))
            found.append(Entry(i, Proj.UP, Matrix(quant, e, f, h)))
            found.append(Entry(i, Proj.DOWN, Matrix(quant, e, h, f)))
        else:
            f = c.intermediate_size
            found.append(Entry(i, Proj.FUSED_GU, Matrix(quant, 2, f, h)))
            found.append(Entry(i, Proj.DOWN, Matrix(quant, 1, h, f)))
    if not c.tie_word_embeddings:
        found.append(Entry(HEAD_LAYER, Proj.HEAD, Matrix(quant, 1, c.vocab_size, h)))
    return found


def place(config: ModelConfig, layer: int | None, field: str) -> tuple[int, Proj, int]:
    """Where a matrix or router of `weights.LayerWeights` goes: layer, projection, first row."""
    c = config
    if layer is None:
        return HEAD_LAYER, Proj.EMBED if field == "embed" else Proj.HEAD, 0
    if field in ("q", "k", "v"):
        return layer, Proj.FUSED_QKV, {"q": 0, "k": c.q_dim, "v": c.q_dim + c.kv_dim}[field]
    if field in ("gate", "up") and not c.layer_is_moe[layer]:
        return layer, Proj.FUSED_GU, 0 if field == "gate" else c.intermediate_size
    return layer, Proj[field.upper()], 0


@dataclass(frozen=True, eq=False)
class SmallWeights:
    """Norms and biases: they stay float32 and go with `native.dev_decode_init`."""

    final_norm: F32  # [H]
    layers: list[dict[str, F32]]  # by their names in `weights.LayerWeights`

    @classmethod
    def plain(cls, config: ModelConfig) -> SmallWeights:
        """Norms of ones, biases of zeros: for models of random weights, and for sizes."""
        c, layers = config, []
        hidden, head = np.ones(c.hidden_size, np.float32), np.ones(c.head_dim, np.float32)
        for moe in c.layer_is_moe:
            small = {"input_norm": hidden, "post_norm": hidden}
            if c.qk_norm:
                small |= {"q_norm": head, "k_norm": head}
            sizes: dict[str, int] = {}
            if c.qkv_bias:
                sizes |= {"q_bias": c.q_dim, "k_bias": c.kv_dim, "v_bias": c.kv_dim}
            if c.o_bias:
                sizes["o_bias"] = c.hidden_size
            if c.mlp_bias and not moe:
                f = c.intermediate_size
                sizes |= {"gate_bias": f, "up_bias": f, "down_bias": c.hidden_size}
            layers.append(small | {name: np.zeros(n, np.float32) for name, n in sizes.items()})
        return cls(hidden, layers)


def decode_config(
    config: ModelConfig,
    small: SmallWeights,
    ctx_size: int,
    kv: str,
    rope: tuple[F32, F32],
    quant: str,
    layers: range | None = None,
) -> DecodeConfig:
    """The model as the library sees it. rope: cos and sin ``[ctx_size, head_dim / 2]``; empty
    arrays do for `native.decode_size`. layers: these alone, as a segment for
    `native.dev_layers_run`; ``small`` is that of the whole model.

    Unquantised weights are asked for by those who want exact logits, so their prompts are computed
    with activations in two parts; against the rounding of q8 and q4 one part of 11 bits is nothing.
    A segment always has two: the layers around it are computed exactly.
    """
    c = config
    if layers is not None and not (
        layers.step == 1 and 0 <= layers.start < layers.stop <= len(c.layer_is_moe)
    ):
        raise UsageError(
            f"a segment is one or more neighbouring layers of {len(c.layer_is_moe)}, got {layers}"
        )
    chosen = range(len(c.layer_is_moe)) if layers is None else layers
    dense = not all(c.layer_is_moe[i] for i in chosen)
    return DecodeConfig(
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        intermediate=c.intermediate_size if dense else 0,
        vocab=c.vocab_size if layers is None else 0,
        ctx_size=ctx_size,
        rms_norm_eps=c.rms_norm_eps,
        final_norm=small.final_norm if layers is None else None,
        rope_cos=rope[0],
        rope_sin=rope[1],
        layers=[_layer(small.layers[i], c.layer_is_moe[i], c.layer_window[i]) for i in chosen],
        experts=c.num_experts,
        experts_per_token=c.num_experts_per_tok,
        moe_intermediate=c.moe_intermediate_size,
        norm_topk_prob=c.norm_topk_prob,
        group_size=GROUP,
        kv=kv,
        tied_head=c.tie_word_embeddings,
        prefill_rows=min(PREFILL_ROWS, ctx_size),
        prefill_exact=quant == "bf16" or layers is not None,
        segment=layers is not None,
        first_layer=chosen.start if layers is not None else 0,
    )


def _layer(small: dict[str, F32], moe: bool, window: int | None) -> Layer:
    def joined(*names: str) -> F32 | None:
        parts = [small[name] for name in names if name in small]
        return np.concatenate(parts) if len(parts) == len(names) else None

    return Layer(
        input_norm=small["input_norm"],
        post_norm=small["post_norm"],
        moe=moe,
        window=window or 0,
        q_norm=small.get("q_norm"),
        k_norm=small.get("k_norm"),
        qkv_bias=joined("q_bias", "k_bias", "v_bias"),
        o_bias=small.get("o_bias"),
        gate_up_bias=joined("gate_bias", "up_bias"),
        down_bias=small.get("down_bias"),
    )


@dataclass(frozen=True)
class Need:
    """Device bytes: of the weights, and of everything else that decoding takes, K/V included."""

    weights: int
    decode: int
    margin: int = _MARGIN

    @property
    def total(self) -> int:
        return self.weights + self.decode + self.margin


def device_need(
    config: ModelConfig, quant: str, ctx_size: int, kv: str, *, segment: bool = False
) -> Need:
    """What a model takes on a device. Raises NativeError when the library cannot run it. segment:
    its layers run as one, which takes larger buffers."""
    sizes: dict[Matrix, int] = {}
    weights = 0
    for entry in entries(config, quant):
        if entry.matrix not in sizes:
            sizes[entry.matrix] = cache_size(entry.matrix)
        weights += sizes[entry.matrix]
    none = np.empty((0, 0), np.float32)
    small = SmallWeights.plain(config)
    layers = range(config.num_hidden_layers) if segment else None
    decode = decode_config(config, small, ctx_size, kv, (none, none), quant, layers=layers)
    return Need(weights, decode_size(decode))


__all__ = ["Entry", "Need", "SmallWeights", "decode_config", "device_need", "entries", "place"]
