"""A layer of routed experts: softmax over all router logits, the k largest, their weighted sum.

Only the chosen experts' matrices are read. An expert's rows of a batch are multiplied together,
but contributions are added in the router's order (j = 0 ... k-1) for every token, so that a token
alone and a token in a batch, and another engine, add the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .cache import WeightCache
from .linear import Linear, multiply, multiply_rows
from .norm import silu_times
from .workers import Workers

F32: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class MoeLayer:
    router: F32  # [H, E]
    gate_up: list[Linear]  # E of [2F, H]
    down: list[Linear]  # E of [H, F]
    experts_per_token: int
    norm_topk_prob: bool


Show: TypeAlias = Callable[[str, F32], None]  # (quantity, values): of a trace


def route(layer: MoeLayer, x: F32, show: Show | None = None) -> tuple[NDArray[np.int64], F32]:
    """Experts ``[M, k]`` of each row of ``x [M, H]``, best first, and their weights ``[M, k]``.

    On a tie the lower index comes first.
    """
    p = np.matmul(x, layer.router)
    if show is not None:
        show("router", p)
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-p, axis=-1, kind="stable")[:, : layer.experts_per_token]
    weights = np.take_along_axis(p, chosen, axis=-1)
    if layer.norm_topk_prob:
        weights /= weights.sum(axis=-1, keepdims=True)
    return chosen, weights


def mix_experts(
    layer: MoeLayer,
    x: F32,
    out: F32,
    cache: WeightCache,
    workers: Workers,
    show: Show | None = None,
) -> None:
    """``out [M, H]`` = the experts' weighted sum for ``x [M, H]``; ``show`` is for one row."""
    chosen, weights = route(layer, x, show)
    rows, k = chosen.shape
    parts = workers.scratch.get("experts", rows, k, out.shape[-1])
    if rows == 1:
        _one_token(layer, x[0], chosen[0], parts[0], workers, show)
    else:
        _batch(layer, x, chosen, parts, cache, workers)
    np.multiply(parts[:, 0], weights[:, :1], out=out)
    for j in range(1, k):
        part = parts[:, j]
        part *= weights[:, j : j + 1]
        out += part


def _one_token(
    layer: MoeLayer,
    x: F32,
    chosen: NDArray[np.int64],
    parts: F32,
    workers: Workers,
    show: Show | None,
) -> None:
    """All k experts of one token in two parallel jobs, from the codes; ``parts [k, H]``."""
    experts = [int(e) for e in chosen]
    width = layer.down[0].k
    gate_up = workers.scratch.get("expert_gate_up", len(experts), 2 * width)
    hidden = workers.scratch.get("expert_hidden", len(experts), width)
    multiply_rows([(layer.gate_up[e], x, gate_up[j]) for j, e in enumerate(experts)], workers)
    silu_times(gate_up[:, :width], gate_up[:, width:], hidden)
    if show is not None:
        show("hidden", hidden)
    multiply_rows([(layer.down[e], hidden[j], parts[j]) for j, e in enumerate(experts)], workers)


def _batch(
    layer: MoeLayer,
    x: F32,
    chosen: NDArray[np.int64],
    parts: F32,
    cache: WeightCache,
    workers: Workers,
) -> None:
    """Expert by expert, all rows that chose it; ``parts [M, k, H]``."""
    width = layer.down[0].k
    order = np.argsort(chosen, axis=None, kind="stable")  # flat (row, j), grouped by expert
    experts, starts = np.unique(chosen.reshape(-1)[order], return_index=True)
    flat_parts = parts.reshape(-1, parts.shape[-1])
    for i, e in enumerate(experts.tolist()):
        slots = order[starts[i] : starts[i + 1] if i + 1 < len(starts) else None]
        rows = x[slots // chosen.shape[1]]
        gate_up = workers.scratch.get("expert_gate_up", len(slots), 2 * width)
        hidden = workers.scratch.get("expert_hidden", len(slots), width)
        result = workers.scratch.get("expert_out", len(slots), parts.shape[-1])
        for linear in (layer.gate_up[e], layer.down[e]):
            cache.prepare_expert(linear)
        multiply(layer.gate_up[e], rows, gate_up, workers)
        silu_times(gate_up[:, :width], gate_up[:, width:], hidden)
        multiply(layer.down[e], hidden, result, workers)
        flat_parts[slots] = result
