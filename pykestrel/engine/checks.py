"""What every engine refuses, in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import ContextError, UsageError

if TYPE_CHECKING:
    from . import Engine


def check_ids(engine: Engine, ids: Sequence[int]) -> NDArray[np.int64]:
    """The ids that a forward pass of ``engine`` is to append, as an array. Raises UsageError for
    none and for one outside the vocabulary, ContextError when they do not fit."""
    tokens = np.asarray(ids, np.int64)
    if tokens.ndim != 1 or not len(tokens):
        raise UsageError(f"expected one or more token ids, got shape {tokens.shape}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= engine.vocab_size:
        bad = low if low < 0 else high
        raise UsageError(f"token id {bad} is outside the vocabulary of {engine.vocab_size}")
    if engine.position + len(tokens) > engine.ctx_size:
        raise ContextError(
            f"{len(tokens)} tokens after {engine.position} do not fit the context of "
            f"{engine.ctx_size}; shorten the prompt or raise --ctx-size"
        )
    return tokens


def check_truncation(engine: Engine, position: int) -> None:
    """Raises UsageError for a position that a sequence cannot be truncated to."""
    if not 0 <= position <= engine.position:
        raise UsageError(
            f"cannot truncate to position {position}: the sequence has {engine.position} tokens"
        )


def check_open(closed: bool) -> None:
    """Raises UsageError when the engine is closed."""
    if closed:
        raise UsageError("the model is closed; load it again to use it")
