"""How much memory a model needs on the CPU and how much there is."""

from __future__ import annotations

from collections.abc import Sequence

from ...config import ModelConfig
from ...errors import OutOfMemory
from ...machine import memory
from ...quant import GROUP, n_groups, quantized_bytes
from .blocks import laid_out_bytes
from .kv_cache import kv_bytes

_UNKNOWN = 4 << 30  # assumed free where the system says nothing at all


def memory_needed(config: ModelConfig, quant: str, ctx_size: int, kv: str) -> dict[str, int]:
    """Bytes that `CpuEngine` holds: "weights", "kv" (with the context full), "total", and what
    all dense matrices need more when they are kept as float32: "expanded". "matrices": those of the
    weights that a `Store` holds, to the byte."""
    c = config
    h, q, k, v = c.hidden_size, c.q_dim, c.kv_dim, c.vocab_size
    layers, moe_layers = c.num_hidden_layers, sum(c.layer_is_moe)
    mlp_layers, f, width = layers - moe_layers, c.intermediate_size, c.moe_intermediate_size
    # (N, K, how many). Never a list of all of them: a damaged file may promise 65536 experts.
    dense = [  # the head (the embedding when tied), attention, MLP
        *((v, h, 1), (q + 2 * k, h, layers), (h, q, layers)),
        *((2 * f, h, mlp_layers), (h, f, mlp_layers)),
    ]
    routed = [(n, k_, moe_layers * c.num_experts) for n, k_ in ((2 * width, h), (h, width))]
    floats = h + layers * 2 * h + moe_layers * c.num_experts * h  # norms, routers, biases: float32
    floats += layers * 2 * c.head_dim if c.qk_norm else 0
    floats += layers * (q + 2 * k) if c.qkv_bias else 0
    floats += layers * h if c.o_bias else 0
    floats += mlp_layers * (2 * f + h) if c.mlp_bias else 0
    embedding = 0 if c.tie_word_embeddings else matrix_bytes([(v, h, 1)], quant)
    laid_out = sum(laid_out_bytes(quant, n, k_) * times for n, k_, times in dense + routed)
    if not c.tie_word_embeddings:
        laid_out += quantized_bytes((v, h), quant)  # as it comes
    weights = embedding + matrix_bytes(dense + routed, quant) + 4 * floats
    cache = kv_bytes(c, ctx_size, kv)
    return {
        "weights": weights,
        "kv": cache,
        "total": weights + cache,
        "matrices": laid_out,
        "expanded": sum(4 * n * n_groups(k_) * GROUP * times for n, k_, times in dense),
    }


def matrix_bytes(shapes: Sequence[tuple[int, int, int]], quant: str) -> int:
    """Bytes of matrices ``(N, K, how many)`` as the engine keeps them, with float32 scales."""
    group = {"bf16": 2 * GROUP, "q8": GROUP + 4, "q4": GROUP // 2 + 4}[quant]
    return sum(n * n_groups(k) * group * times for n, k, times in shapes)


def check_memory(
    config: ModelConfig, quant: str, ctx_size: int, kv: str, budget: int | None = None
) -> None:
    """Raise OutOfMemory when weights and K/V do not fit the free memory: to be called before
    anything is read. budget: bytes of the matrices that are to be in memory; None: all."""
    need = memory_needed(config, quant, ctx_size, kv)
    free = available_memory()
    elsewhere = 0 if budget is None else max(0, need["matrices"] - budget)
    if need["total"] - elsewhere <= free:
        return
    raise OutOfMemory(
        f"this model needs {gigabytes(need['total'])} (weights as {quant} "
        f"{gigabytes(need['weights'])}, K/V of {ctx_size} positions as {kv} "
        f"{gigabytes(need['kv'])}), free {gigabytes(free)}; try "
        f"{' or '.join(tips(config, quant, ctx_size, kv, free))}"
    )


def all_expanded(size: int, free: int, left: int | None = None) -> bool:
    """Whether float32 copies of ``size`` bytes are kept when nobody says how many: all or none.
    left: bytes of memory that --host-budget leaves; they are weights in memory too."""
    return size <= free // 2 and (left is None or size <= left)


def tips(config: ModelConfig, quant: str, ctx_size: int, kv: str, free: int) -> list[str]:
    """What would make a model fit that does not."""
    need = memory_needed(config, quant, ctx_size, kv)
    found = []
    if need["weights"] < free:
        row = kv_bytes(config, 1, kv)
        fits = (free - need["weights"]) // row
        found.append(f"--ctx-size {fits}" if fits >= 64 else "a smaller --ctx-size")
        if kv != "int8" and memory_needed(config, quant, ctx_size, "int8")["total"] <= free:
            found.append("--kv int8")
    for smaller in {"bf16": ("q8", "q4"), "q8": ("q4",)}.get(quant, ()):
        other = memory_needed(config, smaller, ctx_size, kv)
        if other["total"] <= free:
            found.append(f"--quant {smaller}")
        elif not found and other["weights"] < free:
            found.append(f"--quant {smaller} with a smaller --ctx-size")
    return found or ["a smaller model"]


def gigabytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"


def available_memory() -> int:
    """Bytes that can be allocated without swapping; a guess where the system does not say."""
    found = memory()
    if found["available"] is not None:
        return found["available"]
    return (found["total"] or 2 * _UNKNOWN) // 2
