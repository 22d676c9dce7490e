"""Every error that pykestrel raises on purpose.

A message is one sentence that names the thing, what was found and what was wanted, and says what
to do next; the command line prints it as one line and exits with ``exit_code``.
"""

from __future__ import annotations


class KestrelError(Exception):
    """Base of all errors a user can meet; ``str(error)`` is the one line to show."""

    exit_code = 1


class UsageError(KestrelError):
    """The call itself is wrong: an unknown flag, a value out of range, two options that exclude."""

    exit_code = 2


class ModelError(KestrelError):
    """A model directory, GGUF file or hub name that cannot be loaded as it is."""


class TokenizerError(ModelError):
    """The model has no usable tokenizer; ids can still be run."""


class TemplateError(KestrelError):
    """A chat template is missing, does not compile, or refused the messages."""


class ContextError(KestrelError):
    """A prompt that does not fit the context."""


class NumericsError(KestrelError):
    """A NaN or infinity appeared in a forward pass; names the layer or the step."""


class OutOfMemory(KestrelError):
    """Memory for weights or K/V could not be had: needs X, free Y, try Z."""


class LibraryUnavailable(KestrelError):
    """The native library was not found or could not be loaded; names every path tried."""

    exit_code = 3


class CudaUnavailable(KestrelError):
    """CUDA was asked for and cannot be used; ``why`` is the reason alone, without what to do."""

    exit_code = 3

    def __init__(self, message: str, why: str | None = None) -> None:
        super().__init__(message)
        self.why = message if why is None else why


class NativeError(KestrelError):
    """A call into the native library failed; carries the C status and ``vcuda_last_error()``."""

    def __init__(self, message: str, status: int = -1) -> None:
        super().__init__(message)
        self.status = status
