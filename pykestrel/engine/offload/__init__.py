"""Inference with a part of the weights on a GPU."""

from __future__ import annotations

from .engine import OffloadEngine
from .experts import Experts
from .plan import Part, Residency, Stacks, Weight, choose, weights_of
from .uploads import UPLOAD_THREADS, upload, upload_stacks

__all__ = [
    "UPLOAD_THREADS",
    "Experts",
    "OffloadEngine",
    "Part",
    "Residency",
    "Stacks",
    "Weight",
    "choose",
    "upload",
    "upload_stacks",
    "weights_of",
]
