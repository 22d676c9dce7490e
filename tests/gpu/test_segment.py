"""A part of a model's layers on the device: hidden states in, hidden states out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cpu_models import make_config, make_weights, moe_config
from numpy.typing import NDArray

from pykestrel import native
from pykestrel.engine.cuda.plan import SmallWeights, decode_config
from pykestrel.errors import NativeError, UsageError
from pykestrel.native import Proj, abi
from pykestrel.native import decode as native_decode
from pykestrel.quant import QTensor, bf16_to_f32, dequantize
from pykestrel.rope import rope_table
from pykestrel.weights import Matrix, ModelWeights

from .conftest import CudaLib
from .device_models import MODELS, cpu_engine, cuda_engine, put_weights, relative, spread

pytestmark = pytest.mark.usefixtures("nothing_left")

F32 = NDArray[np.float32]

# Of tokens as in test_engine.py, of prompts as in test_prefill.py: activations in two parts, but q8
# and q4 weights times their scale rounded to float16.
TOLERANCE = {"f32": 1e-3, "f16": 1e-3, "int8": 3e-2}
PROMPT = {"bf16": 1e-3, "q8": 4e-3, "q4": 4e-3}


def small(name: str, quant: str, **changes: Any) -> ModelWeights:
    if name == "experts":
        base: dict[str, Any] = {"layer_is_moe": (True, False), "num_attention_heads": 4}
        config = moe_config(**{**base, **changes})
    else:
        config = make_config(**{**MODELS[name], **changes})
    return make_weights(config, quant, seed=3)


def some_ids(weights: ModelWeights, count: int) -> list[int]:
    drawn = np.random.default_rng(4).integers(0, weights.config.vocab_size, count)
    return [int(i) for i in drawn]


def floats(matrix: Matrix) -> F32:
    if isinstance(matrix, QTensor):
        return dequantize(matrix)
    return bf16_to_f32(matrix)


@dataclass
class Segment:
    """Layers on a device of their own."""

    handle: native.Handle
    config: native.DecodeConfig

    def run(self, hidden: F32) -> F32:
        """The rows after the layers, appended where the K/V is."""
        out = hidden.copy()
        native.dev_layers_run(self.handle, native.kv_position(self.handle), out)
        return out

    def rows(self, count: int) -> list[NDArray[Any]]:
        """K, V and scales of the first positions, layer by layer, as stored."""
        return rows_of(self.handle, self.config, range(len(self.config.layers)), count)


def rows_of(
    handle: native.Handle, config: native.DecodeConfig, layers: range, count: int
) -> list[NDArray[Any]]:
    found: list[NDArray[Any]] = []
    for layer in layers:
        rows = native.kv_read(handle, config, layer, 0, count)
        found += [part for part in vars(rows).values() if part is not None]
    return found


@contextmanager
def opened(
    weights: ModelWeights,
    layers: range,
    kv: str = "f32",
    *,
    ctx_size: int = 64,
    chunk: int = 16,
    **changes: Any,
) -> Iterator[Segment]:
    """The segment, without an embedding or a head in its cache."""
    c = weights.config
    with native.create(0) as handle:
        norms = put_weights(handle, weights)
        for i in range(c.num_hidden_layers):
            if i not in layers:
                native.cache_drop(handle, native.wkey(i, Proj.FUSED_QKV))
        native.cache_drop(handle, native.wkey(native.HEAD_LAYER, Proj.EMBED))
        if weights.head is not None:
            native.cache_drop(handle, native.wkey(native.HEAD_LAYER, Proj.HEAD))
        rope = rope_table(c, ctx_size)
        config = decode_config(c, norms, ctx_size, kv, rope, weights.quant, layers)
        config = replace(config, prefill_rows=chunk, **changes)
        native.dev_decode_init(handle, config)
        native.prof_reset(handle)
        yield Segment(handle, config)


@dataclass
class Model:
    """Embedding and head on the host, every layer in some segment."""

    weights: ModelWeights
    segments: list[Segment]

    def embed(self, ids: list[int]) -> F32:
        return np.ascontiguousarray(floats(self.weights.embed)[ids])

    def logits(self, ids: list[int]) -> F32:
        x = self.embed(ids)
        for segment in self.segments:
            x = segment.run(x)
        w = self.weights
        square = np.mean(x**2, axis=-1, keepdims=True)
        normed = x / np.sqrt(square + w.config.rms_norm_eps) * w.final_norm
        return normed @ floats(w.embed if w.head is None else w.head).T


@contextmanager
def split(weights: ModelWeights, cuts: list[range], kv: str, **options: Any) -> Iterator[Model]:
    with ExitStack() as stack:
        parts = [stack.enter_context(opened(weights, cut, kv, **options)) for cut in cuts]
        yield Model(weights, parts)


# ---- against the CPU ----------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("name", [*MODELS, "experts"])
def test_a_model_in_segments(cuda_lib: CudaLib, name: str, quant: str, kv: str) -> None:
    """Two segments of a layer each, token by token, through graphs."""
    weights = small(name, quant)
    ids = some_ids(weights, 10)
    cpu = cpu_engine(weights, kv=kv)
    want = np.stack([cpu.forward([token]) for token in ids])
    with split(weights, [range(1), range(1, 2)], kv) as model:
        got = np.concatenate([model.logits([token]) for token in ids])
        assert [native.kv_position(part.handle) for part in model.segments] == [10, 10]
    assert relative(got, want) < TOLERANCE[kv]


@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("name", ["sixteen to one, windows", "untied, ragged", "experts"])
def test_prompts(cuda_lib: CudaLib, name: str, quant: str, kv: str) -> None:
    """33 tokens in chunks of 16, then 2, 1 and 2 again; the CPU does the same."""
    weights = small(name, quant)
    ids = some_ids(weights, 38)
    cpu = cpu_engine(weights, kv=kv)
    with split(weights, [range(2)], kv) as model:
        at = 0
        for count in (33, 2, 1, 2):
            want = cpu.forward(ids[at : at + count], all_logits=True)
            got = model.logits(ids[at : at + count])
            at += count
            assert spread(got, want) < max(TOLERANCE[kv], PROMPT[quant])
            assert native.kv_position(model.segments[0].handle) == at


@pytest.mark.parametrize("count", [1, 2, 33, 64])
def test_lengths(cuda_lib: CudaLib, count: int) -> None:
    """All that fit the context, in chunks and, without buffers for them, token by token."""
    weights = small("plain", "q8")
    ids = some_ids(weights, count)
    want = cpu_engine(weights, kv="f16").forward(ids, all_logits=True)
    for chunk in (16, 64, 0):
        with split(weights, [range(2)], "f16", chunk=chunk) as model:
            assert spread(model.logits(ids), want) < PROMPT["q8"]
            assert native.kv_position(model.segments[0].handle) == count


# ---- against the whole model --------------------------------------------------------------------


def residuals(weights: ModelWeights, trace: F32) -> list[F32]:
    """after_mlp of each layer, of the trace of one token."""
    c = weights.config
    found, at = [], 0
    for moe in c.layer_is_moe:
        at += c.q_dim + 2 * c.kv_dim + c.q_dim + 2 * c.hidden_size
        if moe:
            at += c.num_experts + c.num_experts_per_tok * c.moe_intermediate_size
        else:
            at += c.intermediate_size
        found.append(trace[at - c.hidden_size : at])
    assert at == trace.size
    return found


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
@pytest.mark.parametrize(
    ("name", "quant"), [("biases", "q4"), ("experts", "q8"), ("plain", "bf16")]
)
def test_the_same_bits_as_the_whole_model(
    cuda_lib: CudaLib, name: str, quant: str, kv: str, graph: bool
) -> None:
    """Layers 1 and 2 of three: the residual stream and the K/V."""
    layers: dict[str, Any] = {"num_hidden_layers": 3, "layer_window": (None, 4, None)}
    layers["layer_is_moe"] = (False, name == "experts", False)
    weights = small(name, quant, **layers)
    ids = some_ids(weights, 7)
    engine = cuda_engine(weights, kv=kv)
    try:
        handle = engine.handle
        assert handle is not None
        trace = np.empty((7, native.trace_size(handle)), np.float32)
        step = native.Step(engine.vocab_size)
        native.dev_decode_run(handle, step, 0, ids, abi.OUT_NONE, trace=trace)
        after = [residuals(weights, row) for row in trace]
        wanted_rows = rows_of(handle, engine.device_config, range(1, 3), 7)
    finally:
        engine.close()
    with opened(weights, range(1, 3), kv, graph=graph) as segment:
        for layer in after:
            assert np.array_equal(segment.run(layer[0][None]), layer[2][None])
        rows = segment.rows(7)
        for got, want in zip(rows, wanted_rows, strict=True):
            assert np.array_equal(got, want)


# ---- the sequence -------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["bf16", "q8"])
def test_back_and_on(cuda_lib: CudaLib, quant: str) -> None:
    """After going back the same rows give the same bits; prompts and tokens share their K/V."""
    weights = small("sixteen to one, windows", quant)
    x = np.random.default_rng(6).standard_normal((30, 64)).astype(np.float32)
    with opened(weights, range(2), "f16") as segment:
        first = segment.run(x[:20])
        one = segment.run(x[20:21])
        rows = segment.rows(21)
        native.kv_seek(segment.handle, 20)
        assert np.array_equal(segment.run(x[20:21]), one)
        native.kv_seek(segment.handle, 0)
        assert np.array_equal(segment.run(x[:20]), first)
        assert np.array_equal(segment.run(x[20:21]), one)
        for got, want in zip(segment.rows(21), rows, strict=True):
            assert np.array_equal(got, want)
        native.kv_seek(segment.handle, 9)
        assert spread(segment.run(x[9:20]), first[9:]) < PROMPT[quant]
        again = segment.run(x[20:])
    with opened(weights, range(2), "f16", chunk=0) as segment:
        single = segment.run(x)
    assert spread(first, single[:20]) < PROMPT[quant]
    assert spread(again, single[20:]) < PROMPT[quant]


def test_k_v_from_elsewhere(cuda_lib: CudaLib) -> None:
    """Rows that one segment made serve another one of the same layers."""
    weights = small("experts", "q8")
    x = np.random.default_rng(7).standard_normal((9, 64)).astype(np.float32)
    with opened(weights, range(2), "int8") as one, opened(weights, range(2), "int8") as other:
        one.run(x[:8])
        for layer in range(2):
            rows = native.kv_read(one.handle, one.config, layer, 0, 8)
            native.kv_write(other.handle, other.config, layer, 0, rows)
        native.kv_seek(other.handle, 8)
        assert np.array_equal(one.run(x[8:]), other.run(x[8:]))


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [600, 3000])
def test_what_does_not_fit_float16_is_computed_another_way(cuda_lib: CudaLib, scale: int) -> None:
    """Code times scale, or a hidden activation, is beyond float16: token by token, the same bits.

    The first chunk fits: it is computed again too.
    """
    weights = small("plain", "q8", tie_word_embeddings=False)
    changed = weights.layers[1].down if scale == 600 else weights.layers[1].up
    assert isinstance(changed, QTensor)
    changed.scales[...] = np.float16(scale)
    x = np.random.default_rng(8).standard_normal((20, 64)).astype(np.float32)
    x[:16] *= 1e-5 if scale == 3000 else 1
    with opened(weights, range(2)) as segment:
        got = segment.run(x)
    with opened(weights, range(2), chunk=0) as segment:
        want = segment.run(x)
    assert np.isfinite(want).all()
    assert np.array_equal(got, want)


@pytest.mark.parametrize("count", [1, 5])
def test_what_is_not_finite_is_given(cuda_lib: CudaLib, count: int) -> None:
    weights = small("plain", "bf16")
    x = np.random.default_rng(9).standard_normal((count, 64)).astype(np.float32)
    x[-1, 3] = np.inf
    with opened(weights, range(2)) as segment:
        got = segment.run(x)
        assert np.isfinite(got[:-1]).all()
        assert not np.isfinite(got[-1]).any()
        assert native.kv_position(segment.handle) == count


@pytest.mark.parametrize("count", [1, 3, 20])
def test_one_copy_each_way(cuda_lib: CudaLib, count: int) -> None:
    weights = small("experts", "q8")
    x = np.random.default_rng(9).standard_normal((count, 64)).astype(np.float32)
    for chunk in (16, 0):
        copies = count if chunk == 0 else -(-count // chunk)
        with opened(weights, range(2), chunk=chunk) as segment:
            before = segment.run(x)
            native.kv_seek(segment.handle, 0)
            native.prof_reset(segment.handle)
            assert np.array_equal(segment.run(x), before)
            prof = native.prof_read(segment.handle)
            assert (prof.tokens, prof.h2d_copies, prof.d2h_copies) == (count, copies, copies)
            assert prof.cache_probe.count == 1
            graphs = chunk == 0 or count == 1
            assert prof.launches == copies if graphs else prof.launches > copies
            # timing: kernel by kernel, and the same bits
            native.prof_timing(segment.handle, True)
            native.kv_seek(segment.handle, 0)
            native.prof_reset(segment.handle)
            assert np.array_equal(segment.run(x), before)
            prof = native.prof_read(segment.handle)
            assert prof.gemm.count >= copies * 3
            assert prof.attention.count == 2 * copies
            assert prof.moe.count >= copies
            assert prof.launches > copies


# ---- what is refused ----------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit(cuda_lib: CudaLib) -> None:
    weights = small("plain", "q8")
    x = np.ones((21, 64), np.float32)
    with opened(weights, range(2), ctx_size=20) as segment:
        with pytest.raises(NativeError, match="21 tokens at position 0 do not fit the ctx_size"):
            segment.run(x)
        assert native.prof_read(segment.handle).launches == 0
        segment.run(x[:20])
        with pytest.raises(NativeError, match="1 tokens at position 20 do not fit"):
            segment.run(x[:1])
        assert native.kv_position(segment.handle) == 20


def test_calls_for_the_other_kind(cuda_lib: CudaLib) -> None:
    weights = small("plain", "q8")
    x = np.ones((2, 64), np.float32)
    with opened(weights, range(2)) as segment:
        handle = segment.handle
        step = native.Step(weights.config.vocab_size)
        words = "needs a whole model and this one is a segment of 2 layers"
        for run in (native.dev_decode_run, native.dev_prefill):
            with pytest.raises(NativeError, match=f"vcuda_dev_.* {words}") as caught:
                run(handle, step, 0, [1], abi.OUT_NONE)
            assert caught.value.status == abi.NOT_DONE
        with pytest.raises(NativeError, match=f"vcuda_dev_decode_logits {words}"):
            native.dev_decode_logits(handle, 80)
        with pytest.raises(NativeError, match=f"vcuda_trace_size {words}"):
            native.trace_size(handle)
        assert native.prof_read(handle).launches == 0
        segment.run(x)
    engine = cuda_engine(weights)
    try:
        assert engine.handle is not None
        with pytest.raises(NativeError, match="needs a segment and this is a whole model"):
            native.dev_layers_run(engine.handle, 0, x)
        assert (x == 1).all()
    finally:
        engine.close()


def test_calls_that_cannot_be_right(cuda_lib: CudaLib) -> None:
    weights = small("plain", "q8")
    x = np.ones((2, 64), np.float32)
    with native.create(0) as handle, pytest.raises(NativeError, match="has not been set up"):
        native.dev_layers_run(handle, 0, x)
    with opened(weights, range(1, 2)) as segment:
        handle = segment.handle
        with pytest.raises(NativeError, match="position is 1 and the handle is at 0"):
            native.dev_layers_run(handle, 1, x)
        with pytest.raises(NativeError, match="count is 0; it must be 1 or more"):
            native.dev_layers_run(handle, 0, x[:0])
        with pytest.raises(NativeError, match="'hidden' is NULL"):
            native_decode.load().vcuda_dev_layers_run(handle.pointer, 0, 2, None)
        fixed = x.copy()
        fixed.flags.writeable = False
        wrong = (x[:, :63], x.astype(np.float64), x[0], np.ones((2, 128), np.float32)[:, ::2])
        for array in wrong:
            with pytest.raises(UsageError, match=r"hidden must be contiguous float32 \[any, 64\]"):
                native.dev_layers_run(handle, 0, array)
        with pytest.raises(UsageError, match="can be written to"):
            native.dev_layers_run(handle, 0, fixed)
        native.cache_drop(handle, native.wkey(1, Proj.O))
        with pytest.raises(NativeError, match=r"O of layer 1 is not in the cache .1 of 4 weights"):
            segment.run(x)
        assert native.prof_read(handle).launches == 0
        assert native.kv_position(handle) == 0


def test_configs_that_cannot_be_right(cuda_lib: CudaLib) -> None:
    weights = small("experts", "q8")
    with opened(weights, range(1, 2)) as segment:
        good = segment.config
        assert (good.segment, good.first_layer, good.prefill_exact) == (True, 1, True)
        for changes, words in (
            ({"segment": 2}, "config.segment is 2; it must be 0 to 1"),
            ({"first_layer": -1}, "config.first_layer is -1; it must be 0 to 1048576"),
            ({"segment": False}, "config.first_layer is 1; it must be 0 to 0"),
            ({"segment": False, "first_layer": 0}, "config.vocab is 0"),
            ({"segment": False, "first_layer": 0, "vocab": 9}, "config.final_norm is NULL"),
        ):
            with pytest.raises(NativeError, match=words):
                native.decode_size(replace(good, **changes))
        whole = replace(good, segment=False, first_layer=0, vocab=80, final_norm=weights.final_norm)
        assert native.decode_size(good) < native.decode_size(whole)
        assert native.decode_size(replace(good, prefill_rows=0)) < native.decode_size(good)
        # an older caller's struct ends before `segment`: what lies behind it is not looked at
        raw, keep = native_decode._struct(whole, tables=False)
        size = ctypes.c_uint64(0)
        raw.segment, raw.first_layer, raw.struct_size = 1, 5, abi.DecodeConfigStruct.segment.offset
        native_decode.load().vcuda_decode_size(ctypes.byref(raw), ctypes.byref(size))
        assert size.value == native.decode_size(whole)
        del keep


@pytest.mark.parametrize("layers", [range(0), range(1, 3), range(-1, 1), range(0, 2, 2)])
def test_layers_that_the_model_does_not_have(cuda_lib: CudaLib, layers: range) -> None:
    config = make_config()
    rope = rope_table(config, 16)
    with pytest.raises(UsageError, match="neighbouring layers of 2"):
        decode_config(config, SmallWeights.plain(config), 16, "f16", rope, "q8", layers)
