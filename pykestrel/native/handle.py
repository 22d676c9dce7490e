"""A model's place on one device."""

from __future__ import annotations

import ctypes

from .loader import load


class Handle:
    """A ``vcuda_handle``; `destroy` it, or use it in a ``with`` block."""

    def __init__(self, pointer: ctypes.c_void_p) -> None:
        self.pointer: ctypes.c_void_p | None = pointer

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        destroy(self)


def create(device: int = 0) -> Handle:
    """Take a device into use. Raises NativeError with status -1 when there is none."""
    pointer = ctypes.c_void_p()
    load().vcuda_create(device, ctypes.byref(pointer))
    return Handle(pointer)


def destroy(handle: Handle) -> None:
    """Give back everything the handle holds; a second call does nothing."""
    pointer, handle.pointer = handle.pointer, None
    if pointer is not None:
        load().vcuda_destroy(pointer)
