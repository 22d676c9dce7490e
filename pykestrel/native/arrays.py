"""How NumPy arrays get to the library: checked first, for C would read or write beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import UsageError


def address(
    what: str, array: NDArray[Any] | None, dtype: DTypeLike, shape: Sequence[int | None]
) -> int | None:
    """Where the data of an array begins, for a C pointer; None stays None.

    Raises UsageError unless it is a C-contiguous array of this dtype and shape (None: any extent).
    """
    if array is None:
        return None
    want = np.dtype(dtype)
    fits = isinstance(array, np.ndarray) and array.dtype == want and array.ndim == len(shape)
    fits = fits and all(w is None or w == n for w, n in zip(shape, array.shape, strict=True))
    if not fits or not array.flags.c_contiguous:
        extents = ", ".join("any" if n is None else str(n) for n in shape)
        got = f"a {type(array).__name__}"
        if isinstance(array, np.ndarray):
            layout = "" if array.flags.c_contiguous else ", not contiguous"
            got = f"{array.dtype.name} {list(array.shape)}{layout}"
        raise UsageError(f"{what} must be contiguous {want.name} [{extents}], got {got}")
    return int(array.ctypes.data)


def writable(what: str, array: NDArray[Any], dtype: DTypeLike, shape: Sequence[int | None]) -> int:
    """`address` of an array that C writes to."""
    at = address(what, array, dtype, shape)
    if at is None or not array.flags.writeable:
        raise UsageError(f"{what} must be an array that can be written to")
    return at
