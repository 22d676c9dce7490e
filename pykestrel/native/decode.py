"""Decoding on the device: its configuration, one call of it, and the K/V."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from . import abi
from .arrays import address, writable
from .handle import Handle
from .loader import load

F32: TypeAlias = NDArray[np.float32]

KV_KINDS: Final = {"int8": abi.KV_INT8, "f16": abi.KV_F16, "f32": abi.KV_F32}
_KV_DTYPES: Final[dict[str, Any]] = {"int8": np.int8, "f16": np.float16, "f32": np.float32}
TOP_MAX: Final = abi.TOP_MAX


@dataclass(frozen=True, eq=False)
class Layer:
    """``vcuda_layer``: the small weights of one layer, float32; None: the model has none."""

    input_norm: F32  # [hidden]
    post_norm: F32  # [hidden]
    moe: bool = False
    window: int = 0  # positions that are seen, the own one included; 0: all
    q_norm: F32 | None = None  # [head_dim]
    k_norm: F32 | None = None  # [head_dim]
    qkv_bias: F32 | None = None  # [q_dim + 2 kv_dim]
    o_bias: F32 | None = None  # [hidden]
    gate_up_bias: F32 | None = None  # [2 intermediate]
    down_bias: F32 | None = None  # [hidden]


@dataclass(frozen=True, eq=False)
class DecodeConfig:
    """``vcuda_decode_config``: shapes and switches of a model, or of a segment of its layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    ctx_size: int
    rms_norm_eps: float
    final_norm: F32 | None  # [hidden]; None: a segment
    rope_cos: F32  # [ctx_size, head_dim / 2]
    rope_sin: F32  # [ctx_size, head_dim / 2]
    layers: Sequence[Layer]
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    norm_topk_prob: bool = False
    group_size: int = 32
    kv: str = "int8"
    tied_head: bool = False
    graph: bool = True
    prefill_rows: int = 0  # tokens of a chunk of `dev_prefill`; 0: it is not used
    prefill_exact: bool = False  # activations and K/V in two 16-bit parts instead of one
    segment: bool = False  # for `dev_layers_run`: no embedding, no head; vocab is not looked at
    first_layer: int = 0  # of a segment: its layer i has the weights of layer first_layer + i

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim


def decode_size(config: DecodeConfig) -> int:
    """Device bytes that `dev_decode_init` will take. Raises NativeError for an unsupported model.

    Only shapes and switches are looked at, so the RoPE tables may be empty.
    """
    size = ctypes.c_uint64(0)
    raw, keep = _struct(config, tables=False)
    load().vcuda_decode_size(ctypes.byref(raw), ctypes.byref(size))
    del keep
    return size.value


def dev_decode_init(handle: Handle, config: DecodeConfig) -> None:
    """Allocate everything that decoding will need; the position becomes 0."""
    raw, keep = _struct(config, tables=True)
    load().vcuda_dev_decode_init(handle.pointer, ctypes.byref(raw))
    del keep  # C has copied it
    handle.hidden = config.hidden


def dev_decode_free(handle: Handle) -> None:
    """Free what `dev_decode_init` allocated. The weights stay."""
    load().vcuda_dev_decode_free(handle.pointer)


@dataclass(eq=False)
class Step:
    """``vcuda_decode_step``: what one `dev_decode_run` is given, and room for what it answers.

    Made once and used again, so that a token costs no allocation.
    """

    vocab: int
    id: int = 0  # GREEDY and TOP: of the largest logit
    top_count: int = 0  # TOP: how many candidates there are; 0: too many tie
    nonfinite: bool = False  # a logit was NaN or infinite: why the answer is -1
    max_logit: float = 0.0
    sum_exp: float = 0.0
    top_ids: NDArray[np.int32] = field(init=False)  # [TOP_MAX]
    top_logits: F32 = field(init=False)  # [TOP_MAX]

    def __post_init__(self) -> None:
        self.top_ids = np.zeros(abi.TOP_MAX, np.int32)
        self.top_logits = np.zeros(abi.TOP_MAX, np.float32)
        self._one = np.zeros(1, np.int32)
        self._ids = self._one  # those of the last call, which C reads
        self._raw = abi.DecodeStepStruct(struct_size=ctypes.sizeof(abi.DecodeStepStruct))
        self._raw.top_ids = self.top_ids.ctypes.data
        self._raw.top_logits = self.top_logits.ctypes.data


def dev_decode_run(
    handle: Handle,
    step: Step,
    position: int,
    ids: Sequence[int] | NDArray[np.int32],
    out: int,
    *,
    logits: F32 | None = None,
    vocab_limit: int = 0,
    top: int = 0,
    temperature: float = 1.0,
    trace: F32 | None = None,
) -> None:
    """Append ``ids`` at ``position``, which the K/V must be at; ``step`` gets the answers.

    out: `abi.OUT_NONE` ... `abi.OUT_TOP`. logits: written by LOGITS [vocab] and ALL_LOGITS [count,
    vocab]. vocab_limit: GREEDY and TOP look at ids below it only; 0: all. top, temperature: of TOP.
    trace: written with [count, trace_size]. Raises NativeError; with status -1 nothing has changed
    (``step.nonfinite`` says whether a logit was to blame).
    """
    raw = _prepare(step, position, ids, out, logits, vocab_limit, top, temperature)
    if trace is not None:
        raw.trace = writable("trace", trace, np.float32, (raw.count, trace_size(handle)))
    _run(step, load().vcuda_dev_decode_run, handle)


def dev_prefill(
    handle: Handle,
    step: Step,
    position: int,
    ids: Sequence[int] | NDArray[np.int32],
    out: int,
    *,
    logits: F32 | None = None,
    vocab_limit: int = 0,
    top: int = 0,
    temperature: float = 1.0,
) -> None:
    """`dev_decode_run` for many tokens: ``prefill_rows`` of the configuration at a time."""
    _prepare(step, position, ids, out, logits, vocab_limit, top, temperature)
    _run(step, load().vcuda_dev_prefill, handle)


def _prepare(
    step: Step,
    position: int,
    ids: Sequence[int] | NDArray[np.int32],
    out: int,
    logits: F32 | None,
    vocab_limit: int,
    top: int,
    temperature: float,
) -> abi.DecodeStepStruct:
    """The struct of ``step``, filled; it keeps the ids alive."""
    raw = step._raw
    if len(ids) == 1:
        step._one[0] = ids[0]
        tokens = step._one
    else:
        tokens = np.ascontiguousarray(ids, np.int32)
    count = len(tokens)
    raw.logits = raw.trace = None
    if out in (abi.OUT_LOGITS, abi.OUT_ALL_LOGITS):
        shape = (step.vocab,) if out == abi.OUT_LOGITS else (count, step.vocab)
        if logits is None:
            raise UsageError("decode_run needs an array for the logits that it is asked for")
        raw.logits = writable("logits", logits, np.float32, shape)
    elif out == abi.OUT_TOP and not 1 <= top <= abi.TOP_MAX:
        raise UsageError(f"between 1 and {abi.TOP_MAX} candidates can be had, got {top}")
    step._ids = tokens
    raw.ids = tokens.ctypes.data
    raw.position, raw.count, raw.out = position, count, out
    raw.vocab_limit, raw.top, raw.temperature = vocab_limit, top, temperature
    raw.id = raw.top_count = raw.nonfinite = 0
    return raw


def _run(step: Step, call: Callable[..., int], handle: Handle) -> None:
    raw = step._raw
    try:
        call(handle.pointer, ctypes.byref(raw))
    finally:
        step.id, step.top_count, step.nonfinite = raw.id, raw.top_count, bool(raw.nonfinite)
        step.max_logit, step.sum_exp = raw.max_logit, raw.sum_exp


def dev_decode_logits(handle: Handle, vocab: int) -> F32:
    """Logits ``[vocab]`` of the last token of the last run, unless that was OUT_NONE."""
    logits = np.empty(vocab, np.float32)
    load().vcuda_dev_decode_logits(handle.pointer, logits.ctypes.data)
    return logits


def dev_layers_run(handle: Handle, position: int, hidden: F32) -> None:
    """A segment's layers over the tokens at ``position`` and after, which the K/V must be at.

    hidden: ``[count, config.hidden]``, the residual stream before the segment's first layer; it
    becomes that after its last, finite or not. Raises NativeError; with status -1 nothing has
    changed.
    """
    data = writable("hidden", hidden, np.float32, (None, handle.hidden))
    load().vcuda_dev_layers_run(handle.pointer, position, len(hidden), data)


def trace_size(handle: Handle) -> int:
    """Floats of one token's trace; vcuda.h says what they are."""
    size = ctypes.c_uint64(0)
    load().vcuda_trace_size(handle.pointer, ctypes.byref(size))
    return size.value


# ---- K/V ----------------------------------------------------------------------------------------


def kv_position(handle: Handle) -> int:
    """How many positions the K/V holds."""
    position = ctypes.c_int32(0)
    load().vcuda_kv_position(handle.pointer, ctypes.byref(position))
    return position.value


def kv_seek(handle: Handle, position: int) -> None:
    """Set it: down forgets rows, up is for rows that `kv_write` has put there."""
    load().vcuda_kv_seek(handle.pointer, position)


@dataclass(frozen=True, eq=False)
class KVRows:
    """K and V of some positions of one layer, as they are stored, keys after RoPE."""

    k: NDArray[Any]  # int8, float16 or float32 [n, kv_dim]
    v: NDArray[Any]
    k_scales: F32 | None  # [n, kv_heads]; None unless int8
    v_scales: F32 | None

    @classmethod
    def empty(cls, kind: str, n: int, kv_heads: int, head_dim: int) -> KVRows:
        """Room for ``n`` positions."""
        k, v = (np.empty((n, kv_heads * head_dim), _KV_DTYPES[kind]) for _ in "kv")
        if kind != "int8":
            return cls(k, v, None, None)
        k_scales, v_scales = (np.empty((n, kv_heads), np.float32) for _ in "kv")
        return cls(k, v, k_scales, v_scales)

    def first(self, n: int) -> KVRows:
        """The first ``n`` positions, as a view."""
        k_scales = None if self.k_scales is None else self.k_scales[:n]
        v_scales = None if self.v_scales is None else self.v_scales[:n]
        return KVRows(self.k[:n], self.v[:n], k_scales, v_scales)


def kv_read(handle: Handle, config: DecodeConfig, layer: int, lo: int, hi: int) -> KVRows:
    """The rows of the positions ``lo`` to ``hi`` of one layer."""
    _check_range(config, layer, lo, hi)
    rows = KVRows.empty(config.kv, hi - lo, config.kv_heads, config.head_dim)
    load().vcuda_kv_read(handle.pointer, layer, lo, hi, *_kv_addresses(config, rows, hi - lo))
    return rows


def kv_write(handle: Handle, config: DecodeConfig, layer: int, lo: int, rows: KVRows) -> None:
    """Put rows at the positions from ``lo`` on; `kv_seek` makes them count."""
    hi = lo + len(rows.k)
    _check_range(config, layer, lo, hi)
    load().vcuda_kv_write(handle.pointer, layer, lo, hi, *_kv_addresses(config, rows, hi - lo))


def _check_range(config: DecodeConfig, layer: int, lo: int, hi: int) -> None:
    if not (0 <= layer < len(config.layers) and 0 <= lo <= hi <= config.ctx_size):
        raise UsageError(
            f"positions {lo} to {hi} of layer {layer} are outside a K/V of {config.ctx_size} "
            f"positions in {len(config.layers)} layers"
        )


def _kv_addresses(config: DecodeConfig, rows: KVRows, n: int) -> tuple[int | None, ...]:
    dtype = _KV_DTYPES[config.kv]
    if (rows.k_scales is None) != (config.kv != "int8"):
        raise UsageError(
            f"K/V of kind {config.kv} has {'scales' if config.kv == 'int8' else 'no scales'}"
        )
    return (
        address("k", rows.k, dtype, (n, config.kv_dim)),
        address("v", rows.v, dtype, (n, config.kv_dim)),
        address("k_scales", rows.k_scales, np.float32, (n, config.kv_heads)),
        address("v_scales", rows.v_scales, np.float32, (n, config.kv_heads)),
    )


# ---- measuring ----------------------------------------------------------------------------------


def dev_bandwidth(handle: Handle, size: int = 1 << 30, repeats: int = 5) -> float:
    """Bytes a second that the device reads at best: the median over ``repeats``."""
    rate = ctypes.c_double(0.0)
    load().vcuda_dev_bandwidth(handle.pointer, size, repeats, ctypes.byref(rate))
    return rate.value


# ---- to C ---------------------------------------------------------------------------------------


def _struct(
    config: DecodeConfig, *, tables: bool
) -> tuple[abi.DecodeConfigStruct, tuple[Any, ...]]:
    """The struct, and what must live as long as it does."""
    c = config
    if c.kv not in KV_KINDS:
        raise UsageError(f"K/V is one of {', '.join(KV_KINDS)}, got {c.kv!r}")
    layers = (abi.LayerStruct * len(c.layers))(*(_layer_struct(c, layer) for layer in c.layers))

    def rope(name: str) -> int | None:
        if not tables:  # nobody reads it: it must only not be NULL
            return ctypes.addressof(layers)
        return address(name, getattr(c, name), np.float32, (c.ctx_size, c.head_dim // 2))

    raw = abi.DecodeConfigStruct(
        struct_size=ctypes.sizeof(abi.DecodeConfigStruct),
        layers=len(c.layers),
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        intermediate=c.intermediate,
        vocab=c.vocab,
        ctx_size=c.ctx_size,
        experts=c.experts,
        experts_per_token=c.experts_per_token,
        moe_intermediate=c.moe_intermediate,
        norm_topk_prob=int(c.norm_topk_prob),
        group_size=c.group_size,
        kv=KV_KINDS[c.kv],
        tied_head=int(c.tied_head),
        graph=int(c.graph),
        rms_norm_eps=c.rms_norm_eps,
        final_norm=address("final_norm", c.final_norm, np.float32, (c.hidden,)),
        rope_cos=rope("rope_cos"),
        rope_sin=rope("rope_sin"),
        layer_params=layers,
        prefill_rows=c.prefill_rows,
        prefill_exact=int(c.prefill_exact),
        segment=int(c.segment),
        first_layer=c.first_layer,
    )
    return raw, (config, layers)


def _layer_struct(c: DecodeConfig, layer: Layer) -> abi.LayerStruct:
    shapes = {
        "input_norm": c.hidden,
        "post_norm": c.hidden,
        "q_norm": c.head_dim,
        "k_norm": c.head_dim,
        "qkv_bias": c.q_dim + 2 * c.kv_dim,
        "o_bias": c.hidden,
        "gate_up_bias": 2 * c.intermediate,
        "down_bias": c.hidden,
    }
    return abi.LayerStruct(
        struct_size=ctypes.sizeof(abi.LayerStruct),
        moe=int(layer.moe),
        window=layer.window,
        **{
            name: address(name, getattr(layer, name), np.float32, (n,))
            for name, n in shapes.items()
        },
    )
