"""Products of rows in the host's memory with weights of the device's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from . import abi
from .arrays import address, writable
from .handle import Handle
from .loader import load
from .weights import cache_find


@dataclass(frozen=True)
class Product:
    """``vcuda_product``: rows ``first ..`` of x times the transpose of matrix ``index``."""

    key: int
    rows: int
    stride: int  # floats from one row of its result to the next, at least its columns
    first: int = 0
    index: int = 0  # of the entry's stack; -1: all of it, one matrix beside the other
    y: int = 0  # where its result begins in y, in floats


class Products:
    """The products of one call as C takes them: made once, used by every call that repeats them."""

    def __init__(self, products: Sequence[Product]) -> None:
        if not products:
            raise UsageError("a call needs at least one product")
        self.count = len(products)
        self.array = (abi.ProductStruct * self.count)()
        for raw, product in zip(self.array, products, strict=True):
            raw.struct_size = ctypes.sizeof(abi.ProductStruct)
            raw.rows = product.rows
            raw.wkey = product.key
            raw.index = product.index
            raw.first = product.first
            raw.y = product.y
            raw.stride = product.stride

    def __len__(self) -> int:
        return self.count


def dev_gemm(
    handle: Handle, key: int, x: NDArray[np.float32], index: int = 0
) -> NDArray[np.float32]:
    """``x [m, k]`` times the transpose of matrix ``index`` of an entry: float32 ``[m, n]``."""
    matrix = cache_find(handle, key)
    at = address("x", x, np.float32, (None, matrix.k))
    y = np.empty((len(x), matrix.n), np.float32)
    load().vcuda_dev_gemm(handle.pointer, key, index, at, len(x), y.ctypes.data)
    return y


def dev_gemm_fused(
    handle: Handle, products: Products, x: NDArray[np.float32], y: NDArray[np.float32]
) -> None:
    """All products with rows of ``x [rows, k]``, into ``y``, a contiguous array of any shape.

    One copy each way and one wait. On a NativeError y is as it was; what no result covers stays.
    """
    at = address("x", x, np.float32, (None, None))
    to = writable("y", y, np.float32, np.shape(y))
    rows, k = x.shape
    load().vcuda_dev_gemm_fused(
        handle.pointer, products.array, products.count, at, rows, k, to, y.size
    )
