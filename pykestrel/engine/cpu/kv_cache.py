"""Keys and values of one sequence: int8 with a float32 scale a (position, head), f16, or f32.

Row p of a layer is ``[k of all heads | v of all heads]``; both are written together and, in decode,
converted together. Memory grows with the sequence (doubling), not with ctx_size.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...config import ModelConfig

F32: TypeAlias = NDArray[np.float32]
# Of one layer: k and v [n, kv_dim] as they are stored, and their scales [n, kv_heads].
StoredRows: TypeAlias = "tuple[NDArray[Any], NDArray[Any], F32, F32]"

KV_KINDS: Final = ("int8", "f16", "f32")
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "int8": np.dtype(np.int8),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}
_FIRST_ROWS = 256
_F16_INFINITY: Final = np.int16(0x7C00)  # the exponent of infinities and NaN
_F16_BITS: Final = np.int32(0x8FFFE000 - (1 << 32))
_F16_BIAS: Final = np.float32(2.0**112)
_TINY = np.float32(1e-30)  # scale of a head that is all zeros: 0 / 0 would make its codes NaN


def widen_f16(half: NDArray[np.float16], out: F32) -> None:
    """``half``, of which all are finite, as float32: the same numbers as a cast, which NumPy does
    in software and a sixth as fast.

    The bits of the fraction and the exponent move to where float32 has them, the sign is spread by
    the arithmetic shift and cut out, and the factor is the difference of the exponents' biases; it
    makes subnormal numbers right too.
    """
    words = out.view(np.int32)
    np.left_shift(half.view(np.int16), 13, out=words, dtype=np.int32)
    np.bitwise_and(words, _F16_BITS, out=words)
    np.multiply(out, _F16_BIAS, out=out)


def kv_bytes(config: ModelConfig, positions: int, kind: str) -> int:
    """Bytes of K and V of ``positions`` positions in all layers."""
    row = 2 * config.kv_dim * _DTYPES[kind].itemsize
    if kind == "int8":
        row += 2 * config.num_key_value_heads * 4
    return config.num_hidden_layers * positions * row


class KVCache:
    """``rows[layer]``: [capacity, 2, kv_heads, head_dim]; ``scales[layer]``: float32
    [capacity, 2, kv_heads], int8 only."""

    def __init__(self, config: ModelConfig, ctx_size: int, kind: str) -> None:
        self.kind = kind
        self.ctx_size = ctx_size
        self.heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        layers = config.num_hidden_layers
        shape = (0, 2, self.heads, self.head_dim)
        self.rows: list[NDArray[Any]] = [np.empty(shape, _DTYPES[kind]) for _ in range(layers)]
        self.scales: list[F32] = [np.empty(shape[:-1], np.float32) for _ in range(layers)]
        self._finite = True  # of f16: no row that was ever stored holds an infinity or a NaN

    @property
    def nbytes(self) -> int:
        scales = sum(s.nbytes for s in self.scales) if self.kind == "int8" else 0
        return sum(r.nbytes for r in self.rows) + scales

    def reserve(self, positions: int, keep: int) -> None:
        """Room for ``positions`` rows in every layer; the first ``keep`` stay as they are.

        Safe to interrupt: a layer is exchanged in one step, and one that has room is left alone.
        """
        for layer, old in enumerate(self.rows):
            if len(old) >= positions and len(self.scales[layer]) >= positions:
                continue
            want = max(_FIRST_ROWS, positions, 2 * keep)
            size = min(self.ctx_size, want)
            new = np.empty((size, *old.shape[1:]), old.dtype)
            new[:keep] = old[:keep]
            if self.kind == "int8":
                scales = np.empty((size, *old.shape[1:3]), np.float32)
                scales[:keep] = self.scales[layer][:keep]
                self.scales[layer] = scales
            else:
                self.scales[layer] = np.empty((size, 0, 0), np.float32)
            self.rows[layer] = new

    def write(self, layer: int, position: int, kv: F32, magnitude: F32) -> None:
        """Store ``kv [M, 2, kv_heads, head_dim]``; ``kv`` and ``magnitude`` (of the same shape)
        are scratch afterwards."""
        rows = self.rows[layer][position : position + len(kv)]
        if self.kind != "int8":
            np.copyto(rows, kv, casting="unsafe")
            self._look_at(rows)
            return
        scales = self.scales[layer][position : position + len(kv)]
        np.abs(kv, out=magnitude)
        np.maximum.reduce(magnitude, axis=-1, out=scales)
        np.multiply(scales, np.float32(1 / 127), out=scales)
        np.maximum(scales, _TINY, out=scales)
        np.divide(kv, scales[..., None], out=kv)
        np.rint(kv, out=kv)
        np.copyto(rows, kv, casting="unsafe")

    def head(self, layer: int, which: int, head: int, lo: int, hi: int, out: F32) -> F32:
        """float32 ``[hi - lo, head_dim]`` of K (``which`` 0) or V (1) of one head, scales applied;
        a view for f32, else in ``out``."""
        rows = self.rows[layer][lo:hi, which, head]
        if self.kind == "f32":
            return rows
        self.widen(rows, out)
        if self.kind == "int8":
            out *= self.scales[layer][lo:hi, which, head, None]
        return out

    def widen(self, stored: NDArray[Any], out: F32) -> None:
        """Stored numbers, of any strides, as float32 in ``out``; scales are not applied."""
        if self.kind == "f16" and self._finite:
            widen_f16(stored, out)
        else:
            np.copyto(out, stored)

    def _look_at(self, rows: NDArray[Any]) -> None:
        if self.kind == "f16" and self._finite:
            self._finite = bool(((rows.view(np.int16) & _F16_INFINITY) != _F16_INFINITY).all())

    def copy_rows(self, lo: int, hi: int) -> list[StoredRows]:
        """Of each layer a copy of k ``[hi - lo, kv_dim]``, v, k scales ``[hi - lo, kv_heads]``
        and v scales (empty unless int8): what another engine needs to go on from here."""
        return [self.copy_layer(layer, lo, hi) for layer in range(len(self.rows))]

    def copy_layer(self, layer: int, lo: int, hi: int) -> StoredRows:
        """`copy_rows` of one layer."""
        n, rows, scales = hi - lo, self.rows[layer], self.scales[layer]
        k, v = (rows[lo:hi, i].reshape(n, -1).copy() for i in (0, 1))
        if self.kind == "int8":
            k_scale, v_scale = (scales[lo:hi, i].copy() for i in (0, 1))
        else:
            k_scale = v_scale = np.empty((n, 0), np.float32)
        return k, v, k_scale, v_scale

    def put_rows(self, layer: int, lo: int, rows: StoredRows) -> None:
        """The inverse of `copy_rows` for one layer: rows of the same kind, from ``lo`` on."""
        k, v, k_scales, v_scales = rows
        hi = lo + len(k)
        for i, (codes, scales) in enumerate(((k, k_scales), (v, v_scales))):
            self.rows[layer][lo:hi, i] = codes.reshape(-1, self.heads, self.head_dim)
            self._look_at(self.rows[layer][lo:hi, i])
            if self.kind == "int8":
                self.scales[layer][lo:hi, i] = scales
