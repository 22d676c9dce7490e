"""Small models on a device: golden ones from their files, random ones from memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pykestrel import native
from pykestrel.engine.cpu import CpuEngine
from pykestrel.engine.cuda import CudaEngine, SmallWeights, entries, place
from pykestrel.loading.families import MATRICES
from pykestrel.quant import QTensor
from pykestrel.weights import ModelWeights

F32 = NDArray[np.float32]

DATA = Path(__file__).parents[1] / "golden" / "data"
CASES = sorted(path.parent.name for path in DATA.glob("*/golden.safetensors"))
REFUSED = ("llama-llama3", "llama-yarn", "qwen2-window")  # head_dim is no multiple of 16
RUNNABLE = [case for case in CASES if case not in REFUSED]

# Shapes and switches that differ, for `cpu_models.make_config`.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": False},
    "one group of seven": {"num_attention_heads": 7, "num_key_value_heads": 1},
    "sixteen to one, windows": {
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "layer_window": (5, None),
    },
    "untied, ragged": {
        "tie_word_embeddings": False,
        "hidden_size": 100,
        "intermediate_size": 50,
        "head_dim": 48,
        "vocab_size": 83,
    },
}


def golden(case: str) -> tuple[list[int], F32, list[int]]:
    """ids, logits after each of them, and the greedy continuation."""
    tensors = load_file(DATA / case / "golden.safetensors")
    return tensors["input_ids"].tolist(), tensors["logits"], tensors["greedy"].tolist()


def put_weights(handle: native.Handle, weights: ModelWeights) -> SmallWeights:
    """Every matrix of a model in memory to the device."""
    c = weights.config
    by_place = {(entry.layer, entry.proj): entry for entry in entries(c, weights.quant)}
    for entry in by_place.values():
        native.cache_begin(handle, entry.key, entry.matrix)

    def put(layer: int | None, field: str, value: Any) -> None:
        where, proj, first = place(c, layer, field)
        entry = by_place[where, proj]
        if isinstance(value, QTensor):
            codes = value.codes.reshape(-1, value.codes.shape[-1])
            scales = value.scales.reshape(-1, value.scales.shape[-1])
            native.cache_rows(handle, entry.key, entry.matrix, first, codes, scales)
        else:
            rows = np.ascontiguousarray(value.reshape(-1, value.shape[-1]))
            native.cache_rows(handle, entry.key, entry.matrix, first, rows)

    put(None, "embed", weights.embed)
    if weights.head is not None:
        put(None, "head", weights.head)
    small: list[dict[str, F32]] = []
    for i, layer in enumerate(weights.layers):
        given = {name: value for name, value in vars(layer).items() if value is not None}
        for name in [*MATRICES, "router"]:
            if name in given:
                put(i, name, given.pop(name))
        small.append(given)
    for entry in by_place.values():
        native.cache_end(handle, entry.key)
    return SmallWeights(weights.final_norm, small)


def cpu_engine(weights: ModelWeights, ctx_size: int = 64, kv: str = "int8") -> CpuEngine:
    """A CPU engine of a copy: it takes over what it gets."""
    return CpuEngine(replace(weights, layers=list(weights.layers)), ctx_size=ctx_size, kv=kv)


def cuda_engine(
    weights: ModelWeights, ctx_size: int = 64, kv: str = "int8", **options: Any
) -> CudaEngine:
    """An engine on the device that falls back to the CPU."""
    handle = native.create(0)
    try:
        return CudaEngine(
            handle,
            weights.config,
            put_weights(handle, weights),
            quant=weights.quant,
            ctx_size=ctx_size,
            kv=kv,
            make_cpu=lambda: cpu_engine(weights, ctx_size, kv),
            **options,
        )
    except BaseException:
        native.destroy(handle)
        raise


def relative(got: F32, want: F32) -> float:
    """The largest difference over the largest magnitude."""
    return float(np.abs(got - want).max() / np.abs(want).max())


def spread(got: F32, want: F32) -> float:
    """The root-mean-square difference over the root-mean-square of what is wanted."""
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
