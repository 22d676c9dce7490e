"""Causal attention with grouped queries over a `KVCache`, in float32.

R = query heads a KV head, T = keys that are looked at, d = head_dim. The scales of int8 K/V are
not multiplied into K and V but, in decode, into the scores and the probabilities: T numbers a head
instead of T * d.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .kv_cache import KVCache
from .workers import Scratch

F32: TypeAlias = NDArray[np.float32]

_DECODE_TILE = 1 << 18  # K/V elements converted to float32 at a time: 1 MB, half an L2
_SCORES = 1 << 20  # score elements of a block of queries: 4 MB
_QUERIES = 128  # queries of a block at most: above it, more of the square is masked away


def first_key(position: int, window: int | None) -> int:
    """The first key that the query at ``position`` sees; a window of W holds W keys."""
    return 0 if window is None else max(0, position - window + 1)


def attend_one(
    q: F32, kv: KVCache, layer: int, position: int, window: int | None, out: F32, scratch: Scratch
) -> None:
    """Decode: ``q`` and ``out`` are ``[kv_heads, R, d]``, the query at ``position``."""
    heads, ratio, dim = q.shape
    lo, hi = first_key(position, window), position + 1
    count = hi - lo
    stored = kv.rows[layer][lo:hi]  # [T, 2, kv_heads, d]
    scales = kv.scales[layer][lo:hi] if kv.kind == "int8" else None  # [T, 2, kv_heads]
    history: F32 | None = None  # the same as float32, when that is small or there already
    if kv.kind == "f32":
        history = stored
    elif 2 * count * heads * dim <= _DECODE_TILE:
        history = scratch.get("history", count, 2, heads, dim)
        kv.widen(stored, history)
    step = max(1, _DECODE_TILE // (heads * dim))
    # Keys times queries, not queries times keys: with the tall matrix first and the queries
    # contiguous OpenBLAS takes a quarter of the time (32 against 120 us for 1000 keys).
    columns = scratch.get("columns", heads, dim, ratio)
    np.multiply(q.transpose(0, 2, 1), np.float32(dim**-0.5), out=columns)
    by_key = scratch.get("by_key", heads, count, ratio)
    if history is not None:
        np.matmul(history[:, 0].transpose(1, 0, 2), columns, out=by_key)
    else:
        for a in range(0, count, step):
            tile = scratch.get("history", min(step, count - a), heads, dim)
            kv.widen(stored[a : a + step, 0], tile)
            np.matmul(tile.transpose(1, 0, 2), columns, out=by_key[:, a : a + step])
    scores = scratch.get("scores", heads, ratio, count)
    if scales is None:
        np.copyto(scores, by_key.transpose(0, 2, 1))
    else:
        np.multiply(by_key.transpose(0, 2, 1), scales[:, 0].T[:, None, :], out=scores)
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=-1, keepdims=True)
    if scales is not None:
        scores *= scales[:, 1].T[:, None, :]
    if history is not None:
        np.matmul(scores, history[:, 1].transpose(1, 0, 2), out=out)
    else:
        out[...] = 0
        for a in range(0, count, step):
            tile = scratch.get("history", min(step, count - a), heads, dim)
            kv.widen(stored[a : a + step, 1], tile)
            out += np.matmul(scores[..., a : a + step], tile.transpose(1, 0, 2))
    out /= total


def attend_many(
    q: F32, kv: KVCache, layer: int, position: int, window: int | None, out: F32, scratch: Scratch
) -> None:
    """Prefill: ``q`` and ``out`` are ``[M, kv_heads, R, d]``, queries from ``position`` on, whose
    own keys and values are in ``kv`` already.

    One KV head at a time, and of it a block of queries against all the keys that any of them sees,
    so that scores never take more than a few MB, whatever the length of the history is.
    """
    count, heads, ratio, dim = q.shape
    start = first_key(position, window)
    end = position + count
    block = max(1, min(_QUERIES, _SCORES // (ratio * (end - start))))
    for head in range(heads):
        keys = kv.head(layer, 0, head, start, end, scratch.get("keys", end - start, dim))
        values = kv.head(layer, 1, head, start, end, scratch.get("values", end - start, dim))
        for a in range(0, count, block):
            b = min(count, a + block)
            lo, hi = first_key(position + a, window), position + b
            seen = slice(lo - start, hi - start)
            queries = scratch.get("queries", b - a, ratio, dim)
            np.multiply(q[a:b, head], np.float32(dim**-0.5), out=queries)
            scores = scratch.get("scores", (b - a) * ratio, hi - lo)
            np.matmul(queries.reshape(-1, dim), keys[seen].T, out=scores)
            _mask(scores.reshape(b - a, ratio, hi - lo), position + a, lo, window)
            scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            total = np.add.reduce(scores, axis=-1)
            result = np.matmul(scores, values[seen])
            result /= total[:, None]
            out[a:b, head] = result.reshape(b - a, ratio, dim)


def _mask(scores: F32, position: int, lo: int, window: int | None) -> None:
    """Put -inf where query ``position + i`` must not see key ``lo + j``; scores [m, R, T]."""
    count, _, seen = scores.shape
    after = position + 1 - lo  # the first key that some query of the block must not see
    late = np.triu(np.ones((count, seen - after), bool))
    np.copyto(scores[:, :, after:], -np.inf, where=late[:, None])
    if window is not None:
        first = np.arange(count)[:, None] + (position - window + 1 - lo)
        early = np.arange(min(count, seen)) < first
        np.copyto(scores[:, :, : early.shape[1]], -np.inf, where=early[:, None])
