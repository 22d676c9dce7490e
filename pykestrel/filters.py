"""Which tokens survive top-k, top-p and min-p, and which of them a random number means.

Arrays here are in the order of rising ids. `Sampler` runs them over a whole vocabulary, or over
the largest logits alone (`narrow`) where these prove what the whole would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .engine import Candidates

if TYPE_CHECKING:
    from .sampling import SamplingParams

# How far a sum of exponentials made by a device in float32 may be from ours in float64. Both are
# within 1e-5; a nucleus that depends on more than this is decided on all logits.
_SUM_ERROR = 1e-4
# exp() is not monotone to the last bit: smaller logits than the last candidate's weigh less than
# this much more than it.
_EXP_SLACK = 1 + 1e-6
# Above it a temperature makes no difference any more; it is finite as a float32.
HOTTEST = 1e30

Kept = tuple[NDArray[Any], NDArray[np.float32]]  # ids, rising, and their weights


def scaled(x: NDArray[Any], top: float, temperature: float) -> NDArray[np.float32]:
    """``(x - top) / temperature`` in float32: the largest is 0, whatever the temperature is."""
    z: NDArray[np.float32] = np.subtract(x, np.float32(top), dtype=np.float32)
    z /= np.float32(min(temperature, HOTTEST))
    return z


def keep_top_k(z: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Positions of the ``k`` largest, and of what equals the last of them."""
    kth = np.partition(z, z.size - k)[z.size - k]
    return np.flatnonzero(z >= kth)


def keep_by_mass(weights: NDArray[np.float32], p: SamplingParams) -> Iterator[NDArray[np.intp]]:
    """Positions that survive top-p, then positions among those that survive min-p."""
    if p.top_p < 1:
        kept = nucleus(weights, p.top_p)
        yield kept
        weights = weights[kept]
    if p.min_p > 0:
        yield np.flatnonzero(weights >= np.float32(p.min_p))  # the best weighs 1


def narrow(c: Candidates, p: SamplingParams, limit: int) -> Kept | None:
    """What survives all filters, from the largest logits alone: the very ids and weights that all
    ``limit`` logits would give. None when these cannot prove it."""
    ids, complete = c.ids, c.ids.size >= limit
    with np.errstate(over="ignore", under="ignore"):
        z = scaled(c.logits, float(c.logits[0]), p.temperature)  # falling, as the logits are
        if 0 < p.top_k < limit:
            if p.top_k > z.size or not (complete or z[-1] < z[p.top_k - 1]):
                return None  # what is missing may equal the last one that stays
            count = int(np.count_nonzero(z >= z[p.top_k - 1]))
            ids, z, complete = ids[:count], z[:count], True
        order = np.argsort(ids)
        ids = ids[order]
        weights = np.exp(z[order])
    if complete:
        for kept in keep_by_mass(weights, p):
            ids, weights = ids[kept], weights[kept]
        return ids, weights
    least = float(weights.min()) * _EXP_SLACK  # no other id weighs more
    if p.top_p < 1:
        inside = _proven_nucleus(weights, p.top_p, c.sum_exp, least)
        if inside is None:
            return None
        ids, weights = ids[inside], weights[inside]
    elif not least < p.min_p:
        return None
    if p.min_p > 0:
        kept = np.flatnonzero(weights >= np.float32(p.min_p))
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _proven_nucleus(
    weights: NDArray[np.float32], top_p: float, total: float, least: float
) -> NDArray[np.intp] | None:
    """`nucleus` of all weights, of which these are the heaviest; the others weigh ``least`` at
    most and all together about ``total``."""
    members = np.sort(weights)[::-1]
    before = np.cumsum(members, dtype=np.float64) - members
    goals = top_p * total * np.array([1 - _SUM_ERROR, 1 + _SUM_ERROR])
    low, high = (int(n) for n in np.searchsorted(before, goals, side="left"))
    if low != high or low >= members.size or not least < members[max(1, low) - 1]:
        return None
    return _heaviest(weights, members, max(1, low))


def nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """Positions, ascending, of the fewest heaviest weights that hold ``top_p`` of the sum.

    A weight stays when the heavier ones before it hold less than that; ties go to the lower
    position. Only what is near the edge is sorted: weights below (1 - top_p) of the mean hold less
    than 1 - top_p together, so they cannot stay; and of many that can, the sums over buckets of
    like weights tell in which bucket the edge is.
    """
    total = float(weights.sum(dtype=np.float64))
    goal = top_p * total
    can_stay = weights >= np.float32((1 - top_p) * total / weights.size * (1 - 1e-6))
    heavier = 0.0  # sum of what is above all members
    if np.count_nonzero(can_stay) <= 4096:
        members = weights[can_stay]
    else:
        # Positive floats are ordered like their bits: 16 of them make buckets 1/128 wide.
        bucket = (weights.view(np.uint32) >> 16).astype(np.int64)
        sums = np.bincount(bucket, weights=weights)
        above = np.concatenate([np.cumsum(sums[:0:-1])[::-1], [0.0]])
        edge = min(int(np.searchsorted(-above, -goal, side="right")), sums.size - 1)
        heavier = float(above[edge])
        members = weights[bucket == edge]
    members = np.sort(members)[::-1]
    before = heavier + np.cumsum(members, dtype=np.float64) - members
    return _heaviest(weights, members, max(1, int(np.searchsorted(before, goal, side="left"))))


def _heaviest(
    weights: NDArray[np.float32], members: NDArray[np.float32], count: int
) -> NDArray[np.intp]:
    """Positions of all weights above those in ``members``, and of the first ``count`` of these,
    which fall; of equal ones those at the lower positions."""
    least = members[count - 1]
    ties = count - int(np.searchsorted(-members, -least, side="left"))
    kept = np.flatnonzero(weights >= least)
    level = np.flatnonzero(weights[kept] == least)[ties:]
    return np.delete(kept, level) if level.size else kept


def pick(weights: NDArray[np.float32], u: float) -> int:
    """The position where ``u`` (0 <= u < 1) of the sum of ``weights`` is passed; never one of
    weight 0."""
    block = 512  # sums of blocks first: a running sum over a whole vocabulary is 5 times as slow
    start = 0
    sums = np.add.reduceat(weights, np.arange(0, weights.size, block), dtype=np.float64)
    goal = u * float(sums.sum())
    if sums.size > 1:
        edges = np.cumsum(sums)
        n = _passed(edges, goal)
        goal -= float(edges[n] - sums[n])
        start = n * block
    return start + _passed(np.cumsum(weights[start : start + block], dtype=np.float64), goal)


def _passed(edges: NDArray[np.float64], goal: float) -> int:
    """The first place where the running sum is above ``goal``. Rounding may put a goal at or past
    the end: then the last place that added anything."""
    last = int(np.searchsorted(edges, edges[-1], side="left"))
    return min(int(np.searchsorted(edges, goal, side="right")), last)
