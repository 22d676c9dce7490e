"""The numbers of pykestrel: what `q8`, `q4` and `bf16` mean, to the byte.

Weights are quantised in groups of `GROUP` = 32 along the input dimension K, symmetrically, with
one float16 scale a group. A last group that is shorter is padded with zeros. This module is the
definition: a quantiser on a device must give the same bytes, so every step below is one IEEE
float32 operation, rounded to nearest even, never contracted into a fused multiply-add.

Scales
    A scale is ``s = float16(x)`` for the float32 quotient ``x`` given below. Three cases are
    special, and every engine needs to know only the first:

    * subnormal float16 scales are ordinary values (float16 to float32 is exact for them);
    * ``|s| < MIN_SCALE = 2**-17`` is raised to ``MIN_SCALE`` with its sign kept. So no scale is
      ever zero, a group of zeros has a scale of that size and codes 0, and the step is nowhere
      coarser than 7.6e-6. (From 2**-17 on, the rounding of a subnormal scale moves a q8 code by
      less than half a step, so the error bound below needs no exception.);
    * a scale that would overflow float16 is refused: `LIMIT` is the largest weight magnitude of a
      kind. A NaN or infinite weight is refused too. Both raise ValueError.

q8: int8 codes in [-127, 127]
    ``absmax = max |w|``; ``s = scale(absmax / 127)``; ``code = rint(w / s)``, then limited to
    [-127, 127]. Error: at most ``s / 2``. Quantising ``-w`` gives the same scales and the
    negated codes.

q4: int4 codes in [-8, 7]
    ``m`` is the weight of the largest magnitude with its sign (the lowest k on a tie). Each
    divisor ``t`` of `Q4_DIVISORS`, in that order, proposes ``s = scale(m / t)``: the extreme
    weight lands near code t, so a scale may be negative. Its codes are ``c = rint(w / s)``
    limited to [-8, 7], its error the sum over the group of ``r * r`` with ``r = w - c * s``. The
    sum is a halving tree: ``e[k] + e[k + 16]`` for k < 16, then + 8, 4, 2, 1 (a butterfly over
    the 32 lanes of a warp). The smallest error wins, the first on a tie. Divisors 7 and 8 are
    what rounding by absmax / 7 and absmax / 8 does, so the search is never worse than either; on
    normally distributed weights it takes 29 % off the squared error of absmax / 7 and is within
    1 % of the best scale there is. Quantising ``-w`` gives the same codes and the negated scales
    (int4 has no +8, so a symmetry that negates the codes cannot exist).

dequantise
    ``float32(code) * float32(s)``, which is exact. So quantising what was dequantised gives equal
    values, for both kinds.

Layout (N output features, K input features, G = ceil(K / 32) groups, Kp = 32 * G)::

    q8  codes  int8   [..., N, Kp]
    q4  codes  uint8  [..., N, Kp / 2]   byte j of the 16 bytes of a group:
                                         low nibble  = code of k = j      plus 8
                                         high nibble = code of k = j + 16 plus 8
    scales     float16 [..., N, G]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .machine import cores

GROUP: Final = 32
MIN_SCALE: Final = 2.0**-17
KINDS: Final = ("q8", "q4")
Q4_DIVISORS: Final = (-8.0, 7.0, 8.0, -7.25, -7.5, -7.75, -8.25, -8.5, -8.75, -9.0)
LIMIT: Final = {"q8": 127 * 65504.0, "q4": 7 * 65504.0}

# Groups a tile: 2048 * 32 float32 = 256 KB, so the three buffers of the q4 search stay in an L2.
_TILE_GROUPS = 2048


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantised matrix, or a stack of them: logical shape ``[..., N, K]``."""

    kind: str  # "q8" | "q4"
    shape: tuple[int, ...]  # logical (..., N, K)
    codes: NDArray[Any]  # q8: int8 [..., N, Kp]; q4: uint8 [..., N, Kp / 2]
    scales: NDArray[np.float16]  # [..., N, G]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"quantisation kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if len(self.shape) < 2:
            raise ValueError(f"a quantised tensor needs 2 or more dimensions, got {self.shape}")
        lead, groups = tuple(self.shape[:-1]), n_groups(self.shape[-1])
        width, dtype = (GROUP, np.int8) if self.kind == "q8" else (GROUP // 2, np.uint8)
        for name, array, last, want in (
            ("codes", self.codes, groups * width, np.dtype(dtype)),
            ("scales", self.scales, groups, np.dtype(np.float16)),
        ):
            if array.shape != (*lead, last) or array.dtype != want:
                raise ValueError(
                    f"{name} of a {self.kind} tensor of shape {tuple(self.shape)} must be "
                    f"{want.name} {[*lead, last]}, got {array.dtype.name} {list(array.shape)}"
                )

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)

    def rows(self, lo: int, hi: int) -> QTensor:
        """Output features ``lo`` to ``hi`` of every matrix, as a view."""
        codes, scales = self.codes[..., lo:hi, :], self.scales[..., lo:hi, :]
        return QTensor(self.kind, (*codes.shape[:-1], self.shape[-1]), codes, scales)

    def __getitem__(self, index: int) -> QTensor:
        """One matrix of a stack (an expert), as a view."""
        if len(self.shape) < 3:
            raise IndexError(f"a tensor of shape {self.shape} is one matrix, not a stack")
        return QTensor(self.kind, tuple(self.shape[1:]), self.codes[index], self.scales[index])


def n_groups(k: int) -> int:
    """Groups of an input dimension ``k``."""
    return -(-k // GROUP)


def quantized_bytes(shape: Sequence[int], kind: str) -> int:
    """Bytes of codes and scales that a tensor of ``shape`` needs ("bf16": its bits)."""
    n = 1
    for extent in shape[:-1]:
        n *= extent
    if kind == "bf16":
        return 2 * n * shape[-1]
    return n * n_groups(shape[-1]) * ((GROUP if kind == "q8" else GROUP // 2) + 2)


def concat_rows(parts: Sequence[QTensor]) -> QTensor:
    """One tensor with the output features of all ``parts`` (fused q/k/v, fused gate/up)."""
    first = parts[0]
    for part in parts[1:]:
        same = part.kind == first.kind and part.shape[:-2] == first.shape[:-2]
        if not same or part.shape[-1] != first.shape[-1]:
            raise ValueError(
                f"cannot put rows of {part.kind} {part.shape} under {first.kind} {first.shape}"
            )
    codes = np.concatenate([p.codes for p in parts], axis=-2)
    scales = np.concatenate([p.scales for p in parts], axis=-2)
    return QTensor(first.kind, (*codes.shape[:-1], first.shape[-1]), codes, scales)


def bf16_to_f32(
    bits: NDArray[np.uint16], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """The float32 values of bf16 bit patterns (exact); into ``out`` when given."""
    if out is None:
        out = np.empty(bits.shape, np.float32)
    np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)
    return out


def f32_to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bit patterns of float32 values, rounded to nearest even; a NaN stays a (quiet) NaN."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    # Adding 0x7FFF, or 0x8000 when the kept half is odd, carries exactly when it must round up.
    rounded = (u + (((u >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (u >> 16) | 0x40, rounded).astype(np.uint16)


def f16_to_f32(x: NDArray[np.float16]) -> NDArray[np.float32]:
    """The float32 values of float16 values (exact, subnormal ones too)."""
    return x.astype(np.float32)


def quantize(w: NDArray[np.float32], kind: str) -> QTensor:
    """Quantise float32 ``[..., N, K]``; ValueError for a non-finite or too large weight."""
    return _quantize(w, kind, lambda part, out: np.copyto(out, part))


def quantize_bf16(bits: NDArray[np.uint16], kind: str) -> QTensor:
    """`quantize` of bf16 bit patterns ``[..., N, K]``, expanded tile by tile."""
    return _quantize(bits, kind, bf16_to_f32)


def dequantize(q: QTensor, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """float32 ``[..., N, K]``; into ``out`` (contiguous) when given."""
    k, groups = q.shape[-1], q.scales.shape[-1]
    if out is None:
        out = np.empty(q.shape, np.float32)
    flat = out.reshape(-1, k)
    codes = q.codes.reshape(-1, q.codes.shape[-1])
    scales = q.scales.reshape(-1, groups)
    step = max(1, _TILE_GROUPS // max(1, groups))
    tile = np.empty((step, groups, GROUP), np.float32)
    for lo in range(0, len(flat), step):
        hi = min(lo + step, len(flat))
        part = tile[: hi - lo]
        unpack_codes(codes[lo:hi], q.kind, part)
        part *= scales[lo:hi, :, None].astype(np.float32)
        flat[lo:hi] = part.reshape(hi - lo, -1)[:, :k]
    return out


def unpack_codes(codes: NDArray[Any], kind: str, out: NDArray[np.float32]) -> None:
    """Codes ``[rows, Kp]`` (q4: ``[rows, Kp / 2]``) as float32 into ``out [rows, G, 32]``."""
    rows, groups, _ = out.shape
    if kind == "q8":
        np.copyto(out, codes.reshape(rows, groups, GROUP))
        return
    nibbles = codes.reshape(rows, groups, GROUP // 2)
    np.copyto(out[..., : GROUP // 2], nibbles & 0x0F)
    np.copyto(out[..., GROUP // 2 :], nibbles >> 4)
    out -= 8.0


def scale_f16(x: NDArray[np.float32]) -> NDArray[np.float16]:
    """The stored scale of a float32 quotient: rounded to float16, at least MIN_SCALE in size."""
    s = x.astype(np.float16)
    small = np.abs(s) < np.float16(MIN_SCALE)
    return np.where(small, np.copysign(np.float16(MIN_SCALE), s), s)


def _quantize(
    w: NDArray[Any], kind: str, load: Callable[[NDArray[Any], NDArray[np.float32]], object]
) -> QTensor:
    """Quantise row tiles on all processors; ``load(rows, out)`` puts float32 rows into ``out``."""
    if kind not in KINDS:
        raise ValueError(f"quantisation kind {kind!r} is not one of {', '.join(KINDS)}")
    if w.ndim < 2:
        raise ValueError(f"a tensor to quantise needs 2 or more dimensions, got {w.shape}")
    k, groups = w.shape[-1], n_groups(w.shape[-1])
    flat = w.reshape(-1, k)
    n = len(flat)
    width, dtype = (GROUP, np.int8) if kind == "q8" else (GROUP // 2, np.uint8)
    codes = np.empty((n, groups * width), dtype)
    scales = np.empty((n, groups), np.float16)
    step = max(1, _TILE_GROUPS // max(1, groups))
    search = _q8_tile if kind == "q8" else _q4_tile

    def tile(lo: int) -> None:
        rows = flat[lo : lo + step]
        dense = np.zeros((len(rows), groups * GROUP), np.float32)
        load(rows, dense[:, :k])
        # k-major: element k of every group lies in one long run, so that each step of the search
        # is a vector operation over groups and the halving tree adds whole rows.
        wt = np.ascontiguousarray(dense.reshape(-1, GROUP).T)
        s, c = search(wt)
        scales[lo : lo + step] = s.reshape(-1, groups)
        codes[lo : lo + step] = np.ascontiguousarray(c.T).reshape(len(rows), -1)

    _for_each(tile, range(0, n, step))
    shape = tuple(w.shape)
    return QTensor(kind, shape, codes.reshape(*shape[:-1], -1), scales.reshape(*shape[:-1], groups))


def _for_each(work: Callable[[int], None], items: range) -> None:
    workers = min(cores(), len(items))
    if workers <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(workers) as pool:  # NumPy lets go of the GIL inside its loops
        jobs = [pool.submit(partial(_run_strided, work, items[i::workers])) for i in range(workers)]
        for job in jobs:
            job.result()


def _run_strided(work: Callable[[int], None], items: range) -> None:
    for item in items:
        work(item)


def _check(absmax: NDArray[np.float32], kind: str) -> None:
    top = float(absmax.max(initial=0.0))
    if not np.isfinite(top):
        raise ValueError(f"a weight is not finite ({top}), so it cannot be quantised")
    if top > LIMIT[kind]:
        raise ValueError(
            f"a weight has magnitude {top:.4g}, more than the {LIMIT[kind]:.4g} that {kind} can "
            "hold with float16 scales"
        )


def _q8_tile(wt: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """Groups ``wt [32, n]`` to scales ``[n]`` and codes ``[32, n]``."""
    tmp = np.abs(wt)
    absmax = tmp.max(axis=0)
    _check(absmax, "q8")
    scales = scale_f16(absmax / np.float32(127))
    np.divide(wt, scales.astype(np.float32), out=tmp)
    np.rint(tmp, out=tmp)
    np.clip(tmp, -127, 127, out=tmp)
    return scales, tmp.astype(np.int8)


def _q4_tile(wt: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Groups ``wt [32, n]`` to scales ``[n]`` and packed codes ``[16, n]``."""
    c, r = np.abs(wt), np.empty_like(wt)
    extreme = np.take_along_axis(wt, c.argmax(axis=0)[None], 0)[0]
    _check(np.abs(extreme), "q4")
    best = np.zeros(wt.shape[1], np.float16)
    best_error = np.full(wt.shape[1], np.inf, np.float32)
    for divisor in Q4_DIVISORS:
        scales = scale_f16(extreme / np.float32(divisor))
        s = scales.astype(np.float32)
        _q4_codes(wt, s, c)
        np.multiply(c, s, out=r)
        np.subtract(wt, r, out=r)
        np.multiply(r, r, out=r)
        half = GROUP // 2
        while half:
            np.add(r[:half], r[half : 2 * half], out=r[:half])
            half //= 2
        better = r[0] < best_error
        np.copyto(best_error, r[0], where=better)
        np.copyto(best, scales, where=better)
    _q4_codes(wt, best.astype(np.float32), c)
    c += 8
    nibbles = c.astype(np.uint8)
    packed = nibbles[: GROUP // 2]
    packed |= nibbles[GROUP // 2 :] << 4
    return best, packed


def _q4_codes(wt: NDArray[np.float32], s: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    np.divide(wt, s, out=out)
    np.rint(out, out=out)
    np.clip(out, -8, 7, out=out)
