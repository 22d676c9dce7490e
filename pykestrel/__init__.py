"""Run language models on one NVIDIA GPU, or on the CPU with NumPy alone.

``load(path)`` gives a `Model`; ``model.generate(prompt)`` and ``model.stream(prompt)`` run it.
Names are looked up on first use, so that ``import pykestrel`` costs a few milliseconds and never
needs a GPU, a driver, the native library or a tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .errors import (
        ContextError,
        CudaUnavailable,
        KestrelError,
        LibraryUnavailable,
        ModelError,
        NativeError,
        NumericsError,
        OutOfMemory,
        TemplateError,
        TokenizerError,
        UsageError,
    )
    from .generate import Chunk, Generation, Timings
    from .meter import LoadMeter
    from .model import Model, load
    from .sampling import SamplingParams

__all__ = [
    "Chunk",
    "ContextError",
    "CudaUnavailable",
    "Generation",
    "KestrelError",
    "LibraryUnavailable",
    "LoadMeter",
    "Model",
    "ModelError",
    "NativeError",
    "NumericsError",
    "OutOfMemory",
    "SamplingParams",
    "TemplateError",
    "Timings",
    "TokenizerError",
    "UsageError",
    "__version__",
    "load",
]

_HOME = {
    "Chunk": "generate",
    "Generation": "generate",
    "Timings": "generate",
    "LoadMeter": "meter",
    "Model": "model",
    "load": "model",
    "SamplingParams": "sampling",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pykestrel' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
