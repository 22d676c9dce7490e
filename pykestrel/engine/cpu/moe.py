"""A layer of routed experts: softmax over all router logits, the k largest, their weighted sum.

Only the chosen experts' matrices are read. An expert's rows of a batch are multiplied together,
but contributions are added in the router's order (j = 0 ... k-1) for every token, so that a token
alone and a token in a batch, and another engine, add the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .cache import WeightCache
from .linear import FEW_ROWS, Linear, lay_out_all, multiply, multiply_rows
from .norm import silu_times
from .offload import Compute, Job, Offload
from .workers import Workers

F32: TypeAlias = NDArray[np.float32]


_TOGETHER = 2048  # slots of a batch whose products are computed, or asked of a device, together


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
    offload: Offload | None = None,
) -> None:
    """``out [M, H]`` = the experts' weighted sum for ``x [M, H]``; ``show`` is for one row."""
    chosen, weights = route(layer, x, show)
    rows, k = chosen.shape
    parts = workers.scratch.get("experts", rows, k, out.shape[-1])
    if rows == 1:
        _one_token(layer, x, chosen[0], parts[0], workers, show, offload)
    else:
        _batch(layer, x, chosen, parts, cache, workers, offload)
    np.multiply(parts[:, 0], weights[:, :1], out=out)
    for j in range(1, k):
        part = parts[:, j]
        part *= weights[:, j : j + 1]
        out += part


def _products(
    x: F32, out: F32, jobs: Sequence[Job], on_cpu: Compute, offload: Offload | None
) -> None:
    if offload is None:
        on_cpu(x, out, jobs)
    else:
        offload.products(x, out, jobs, on_cpu)


def _one_token(
    layer: MoeLayer,
    x: F32,
    chosen: NDArray[np.int64],
    parts: F32,
    workers: Workers,
    show: Show | None,
    offload: Offload | None,
) -> None:
    """All k experts of one token ``x [1, H]`` in two parallel jobs, from the codes; ``parts
    [k, H]``."""
    experts = [int(e) for e in chosen]
    width = layer.down[0].k
    gate_up = workers.scratch.get("expert_gate_up", len(experts), 2 * width)
    hidden = workers.scratch.get("expert_hidden", len(experts), width)

    def on_cpu(x: F32, out: F32, jobs: Sequence[Job]) -> None:
        multiply_rows([(job.linear, x[job.first], out[job.to]) for job in jobs], workers)

    jobs = [Job(layer.gate_up[e], 1, to=j) for j, e in enumerate(experts)]
    _products(x, gate_up, jobs, on_cpu, offload)
    silu_times(gate_up[:, :width], gate_up[:, width:], hidden)
    if show is not None:
        show("hidden", hidden)
    jobs = [Job(layer.down[e], 1, first=j, to=j) for j, e in enumerate(experts)]
    _products(hidden, parts, jobs, on_cpu, offload)


def _batch(
    layer: MoeLayer,
    x: F32,
    chosen: NDArray[np.int64],
    parts: F32,
    cache: WeightCache,
    workers: Workers,
    offload: Offload | None,
) -> None:
    """Expert by expert, all rows that chose it; ``parts [M, k, H]``."""
    width = layer.down[0].k
    order = np.argsort(chosen, axis=None, kind="stable")  # flat (row, j), grouped by expert
    experts, starts = np.unique(chosen.reshape(-1)[order], return_index=True)
    ends = [*starts.tolist()[1:], order.size]
    flat_parts = parts.reshape(-1, parts.shape[-1])

    def on_cpu(x: F32, out: F32, jobs: Sequence[Job]) -> None:
        lay_out_all((job.linear for job in jobs), workers)
        few: list[tuple[Linear, F32, F32]] = []  # rows of experts that few chose, as one job
        for linear, rows, first, to in jobs:
            cache.prepare_expert(linear)
            if rows <= FEW_ROWS and linear.expanded is None:
                few += [(linear, x[first + i], out[to + i]) for i in range(rows)]
            else:
                multiply(linear, x[first : first + rows], out[to : to + rows], workers)
        if few:
            multiply_rows(few, workers)

    for run in _runs(list(zip(experts.tolist(), starts.tolist(), ends, strict=True))):
        begin, end = run[0][1], run[-1][2]
        slots = order[begin:end]
        rows = x[slots // chosen.shape[1]]
        gate_up = workers.scratch.get("expert_gate_up", len(slots), 2 * width)
        hidden = workers.scratch.get("expert_hidden", len(slots), width)
        result = workers.scratch.get("expert_out", len(slots), parts.shape[-1])
        places = [(e, hi - lo, lo - begin, lo - begin) for e, lo, hi in run]
        jobs = [Job(layer.gate_up[e], *place) for e, *place in places]
        _products(rows, gate_up, jobs, on_cpu, offload)
        silu_times(gate_up[:, :width], gate_up[:, width:], hidden)
        jobs = [Job(layer.down[e], *place) for e, *place in places]
        _products(hidden, result, jobs, on_cpu, offload)
        flat_parts[slots] = result


def _runs(
    experts: Sequence[tuple[int, int, int]],
) -> Iterator[Sequence[tuple[int, int, int]]]:
    """``experts`` (number, first slot, end) in runs of at most `_TOGETHER` slots, or one expert."""
    run: list[tuple[int, int, int]] = []
    for expert in experts:
        if run and expert[2] - run[0][1] > _TOGETHER:
            yield run
            run = []
        run.append(expert)
    yield run
