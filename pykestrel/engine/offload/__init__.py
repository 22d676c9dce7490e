"""Inference with a part of the weights on a GPU."""

from __future__ import annotations

from .engine import OffloadEngine, upload
from .experts import Experts
from .plan import Residency, Weight, choose, weights_of

__all__ = [
    "Experts",
    "OffloadEngine",
    "Residency",
    "Weight",
    "choose",
    "upload",
    "weights_of",
]
