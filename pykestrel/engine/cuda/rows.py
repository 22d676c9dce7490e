"""K/V rows of a device as the CPU's K/V holds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ... import native
from ...native import Handle
from ...native.decode import DecodeConfig

if TYPE_CHECKING:
    from ..cpu.kv_cache import StoredRows


def stored_rows(handle: Handle, config: DecodeConfig, lo: int, hi: int) -> Iterator[StoredRows]:
    """K and V of the positions ``lo`` to ``hi``, layer by layer of ``config``."""
    none = np.empty((hi - lo, 0), np.float32)
    for layer in range(len(config.layers)):
        rows = native.kv_read(handle, config, layer, lo, hi)
        k_scales = none if rows.k_scales is None else rows.k_scales
        v_scales = none if rows.v_scales is None else rows.v_scales
        yield rows.k, rows.v, k_scales, v_scales
