"""Models in files: find them, read their configuration, load and quantise their weights."""

from __future__ import annotations

from .info import ModelInfo, describe, read_generation_config
from .load import load_as_needed, load_vectors, load_weights, read_config
from .quantized import save_quantized
from .source import Source, resolve_model

__all__ = [
    "ModelInfo",
    "Source",
    "describe",
    "load_as_needed",
    "load_vectors",
    "load_weights",
    "read_config",
    "read_generation_config",
    "resolve_model",
    "save_quantized",
]
