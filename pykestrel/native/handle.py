"""A model's place on one device."""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import suppress

from ..errors import NativeError
from .loader import load


class Handle:
    """A ``vcuda_handle``; `destroy` it, or use it in a ``with`` block. One that is dropped is
    destroyed too, except at the end of the process and in a fork, where it is not ours."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.pointer: ctypes.c_void_p | None = ctypes.c_void_p()
        self.hidden: int | None = None  # extent of a hidden state, once decoding is set up
        self._library = library
        self._dropped = weakref.finalize(self, _drop, library, self.pointer, os.getpid())
        self._dropped.atexit = False

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        destroy(self)


def _drop(library: ctypes.CDLL, pointer: ctypes.c_void_p, pid: int) -> None:
    if pointer and pid == os.getpid():
        with suppress(NativeError):
            library.vcuda_destroy(pointer)


def create(device: int = 0) -> Handle:
    """Take a device into use. Raises NativeError with status -1 when there is none."""
    handle = Handle(load())  # before the call: an interrupt in it must not lose what it made
    assert handle.pointer is not None
    handle._library.vcuda_create(device, ctypes.byref(handle.pointer))
    return handle


def destroy(handle: Handle) -> None:
    """Give back everything the handle holds; a second call does nothing."""
    pointer, handle.pointer = handle.pointer, None
    handle._dropped.detach()
    if pointer is not None:
        handle._library.vcuda_destroy(pointer)
