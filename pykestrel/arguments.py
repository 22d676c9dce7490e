"""The arguments of `load`: what they may be, and how a wrong one is refused."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from .config import ModelConfig

DEVICES = ("auto", "cuda", "cpu")
PREFILLS = ("auto", "cpu", "cuda")
OFFLOADS = ("segments", "projections")
QUANTS = ("bf16", "q8", "q4")
KV_KINDS = ("int8", "f16", "f32")
DEFAULT_CTX = 4096  # or what the model was trained for, when that is less


def path_of(given: Any, what: str, wanted: str) -> str:
    try:
        return os.fsdecode(given)
    except TypeError:
        raise UsageError(f"{what} must be {wanted}, got {given!r:.60}") from None


def one_of(what: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{what} must be one of {', '.join(allowed)}, got {value!r}")


def check_ctx(wanted: int | None, config: ModelConfig) -> int:
    """The context of a model: ``wanted``, or the default; UsageError beyond the model's limit."""
    limit = config.max_position_embeddings
    if wanted is None:
        return min(limit, DEFAULT_CTX)
    if not 2 <= wanted <= limit:
        raise UsageError(
            f"ctx_size must be between 2 and the {limit} positions that the model was made for, "
            f"got {wanted}"
        )
    return wanted


def flop_of(value: float | None) -> float | None:
    """``min_flop``: operations, 0 or more; None is left to be measured."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"min_flop must be a number of operations, got {value!r:.60}")
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"min_flop must be 0 or more and finite, got {value}")
    return float(value)
