"""A prompt computed many tokens at a time, against the same prompt token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_models import make_config, make_weights, moe_config
from numpy.typing import NDArray

import pykestrel
from pykestrel import native
from pykestrel.engine import Candidates, Picked, Want
from pykestrel.engine.cuda import CudaEngine, plan
from pykestrel.errors import ContextError, NativeError, NumericsError
from pykestrel.native import abi
from pykestrel.quant import QTensor
from pykestrel.weights import ModelWeights

from .conftest import CudaLib
from .device_models import DATA, MODELS, RUNNABLE, cuda_engine, golden, relative, spread

pytestmark = pytest.mark.usefixtures("nothing_left")

# Activations of q8 and q4 weights are float16 in a prompt (11 bits) and int16 codes with a scale a
# group while decoding (15 bits): these differ by as much as one rounding to float16 is.
FAST = 4e-3


def one_by_one(engine: CudaEngine, ids: list[int]) -> NDArray[np.float32]:
    """Logits after each id, by decoding."""
    engine.truncate(0)
    return np.stack([engine.forward([token]) for token in ids])


def rows_of(engine: CudaEngine, count: int) -> list[NDArray[Any]]:
    """K and V of the first positions, layer by layer, as stored."""
    assert engine.handle is not None
    found = []
    for layer in range(engine.config.num_hidden_layers):
        rows = native.kv_read(engine.handle, engine.device_config, layer, 0, count)
        found += [rows.k, rows.v]
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens."""
    monkeypatch.setattr(plan, "PREFILL_ROWS", 16)


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("case", RUNNABLE)
def test_golden_prompts(
    cuda_lib: CudaLib, case: str, kv: str, record_property: Callable[[str, object], None]
) -> None:
    ids, want, _ = golden(case)
    count = len(ids) if cuda_lib.fake is None else 12
    with pykestrel.load(DATA / case, device="cuda", quant="bf16", kv=kv) as model:
        whole = model.logits(ids[:count])
        engine = model.session.engine
        assert isinstance(engine, CudaEngine)
        single = one_by_one(engine, ids[:count])
    record_property("difference", f"{np.abs(whole - single).max():.1e}")
    assert np.abs(whole - single).max() < 2e-2
    if kv == "f32":
        assert np.abs(whole - want[:count]).max() < 2e-2


def small(name: str, quant: str, **changes: Any) -> ModelWeights:
    if name == "experts":
        config = moe_config(layer_is_moe=(True, False), num_attention_heads=4, **changes)
    else:
        config = make_config(**{**MODELS[name], **changes})
    return make_weights(config, quant, seed=3)


def some_ids(weights: ModelWeights, count: int) -> list[int]:
    ids = np.random.default_rng(4).integers(0, weights.config.vocab_size, count)
    return [int(i) for i in ids]


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("name", [*MODELS, "experts"])
def test_a_prompt_in_chunks(cuda_lib: CudaLib, small_chunks: None, name: str, quant: str) -> None:
    """37 tokens: two chunks and a part of one. The K/V that they leave serves decoding."""
    weights = small(name, quant)
    ids = some_ids(weights, 37)
    engine = cuda_engine(weights, kv="f32")
    limit = 1e-4 if quant == "bf16" else FAST
    try:
        whole = engine.forward(ids, all_logits=True)
        rows = rows_of(engine, len(ids))
        after = engine.forward([7])
        single = one_by_one(engine, ids)
        assert spread(whole, single) < limit
        for got, want in zip(rows, rows_of(engine, len(ids)), strict=True):
            assert relative(got, want) < limit
        assert spread(after, engine.forward([7])) < limit
    finally:
        engine.close()


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33, 63])
def test_lengths(cuda_lib: CudaLib, small_chunks: None, count: int, kv: str) -> None:
    weights = small("experts", "q8")
    ids = some_ids(weights, count)
    engine = cuda_engine(weights, kv=kv)
    try:
        whole = engine.forward(ids, all_logits=True)
        # a code of int8 K/V may fall to its neighbour
        assert spread(whole, one_by_one(engine, ids)) < (2e-2 if kv == "int8" else FAST)
        assert engine.position == count
    finally:
        engine.close()


@pytest.mark.parametrize("quant", ["bf16", "q8"])
def test_a_prompt_after_a_conversation(cuda_lib: CudaLib, small_chunks: None, quant: str) -> None:
    """A prompt that begins at a position above 0, and one that begins again below it."""
    weights = small("sixteen to one, windows", quant)
    ids = some_ids(weights, 50)
    engine = cuda_engine(weights, kv="f16")
    limit = 1e-3 if quant == "bf16" else FAST
    try:
        engine.forward(ids[:9])
        engine.forward([ids[9]])
        whole = engine.forward(ids[10:], all_logits=True)
        engine.truncate(20)
        again = engine.forward(ids[20:], all_logits=True)
        single = one_by_one(engine, ids)
        assert spread(whole, single[10:]) < limit
        assert spread(again, single[20:]) < limit
    finally:
        engine.close()


def test_what_comes_back(cuda_lib: CudaLib, small_chunks: None) -> None:
    """The answers of a prompt are parts of its logits; one copy each way."""
    weights = small("plain", "q8")
    ids = some_ids(weights, 21)
    engine = cuda_engine(weights, kv="f16")
    try:
        logits = engine.forward(ids)
        engine.truncate(0)
        assert engine.step(ids, Want(80)) == Picked(int(logits[:80].argmax()))
        assert np.array_equal(engine.last_logits(), logits)
        engine.truncate(0)
        answer = engine.step(ids, Want(80, top=5, temperature=0.7))
        assert isinstance(answer, Candidates)
        best = np.argsort(-logits[:80], kind="stable")[:5]
        assert np.array_equal(answer.ids, best)
        assert np.array_equal(answer.logits, logits[best])

        assert engine.handle is not None
        engine.truncate(0)
        before = native.prof_read(engine.handle)
        step = native.Step(engine.vocab_size)
        native.dev_prefill(engine.handle, step, 0, ids, abi.OUT_GREEDY)
        after = native.prof_read(engine.handle)
        assert (after.h2d_copies - before.h2d_copies, after.d2h_copies - before.d2h_copies) == (
            1,
            1,
        )
        assert after.tokens - before.tokens == len(ids)
        assert step.id == int(logits.argmax())
    finally:
        engine.close()


def test_what_does_not_fit_float16_is_computed_another_way(cuda_lib: CudaLib) -> None:
    """A hidden activation of a million: the prompt is then decoded, to the same bits."""
    weights = small("plain", "q8")
    up = weights.layers[1].up
    assert isinstance(up, QTensor)
    up.scales[...] = np.float16(3000)
    ids = some_ids(weights, 9)
    engine = cuda_engine(weights, kv="f16")
    try:
        logits = engine.forward(ids, all_logits=True)
        assert np.isfinite(logits).all()
        assert np.array_equal(logits, one_by_one(engine, ids))
        assert engine.fallback is None
    finally:
        engine.close()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("every", [False, True])
def test_a_weight_that_is_no_float16(cuda_lib: CudaLib, layer: int, every: bool) -> None:
    """Code times scale is beyond float16 and the product is not: float32 decides."""
    weights = small("plain", "q8")
    down = weights.layers[layer].down
    assert isinstance(down, QTensor)
    down.scales[...] = np.float16(600)
    ids = some_ids(weights, 9)
    engine = cuda_engine(weights, kv="f32")
    try:
        logits = engine.forward(ids, all_logits=every)
        single = one_by_one(engine, ids)
        assert np.isfinite(single).all()
        assert np.array_equal(logits, single if every else single[-1])
    finally:
        engine.close()


def test_a_nan_that_no_row_sees(cuda_lib: CudaLib) -> None:
    """Broken K/V that has left every window has no part in the result."""
    weights = small("plain", "q8", layer_window=(4, 4))
    ids = some_ids(weights, 14)
    engine = cuda_engine(weights, kv="f32")
    try:
        engine.forward(ids[:10])
        wanted = engine.forward(ids[10:])
        handle, c = engine.handle, engine.device_config
        assert handle is not None
        native.kv_seek(handle, 0)
        for layer in range(len(c.layers)):
            rows = native.kv_read(handle, c, layer, 0, 1)
            rows.v[...] = np.nan
            native.kv_write(handle, c, layer, 0, rows)
        native.kv_seek(handle, 10)
        engine.truncate(10)
        assert spread(engine.forward(ids[10:]), wanted) < FAST
    finally:
        engine.close()


@pytest.mark.parametrize("quant", ["bf16", "q8"])
def test_a_nan_is_an_error(cuda_lib: CudaLib, quant: str) -> None:
    weights = small("plain", quant)
    weights.layers[1].post_norm[3] = np.nan
    engine = cuda_engine(weights, kv="f16")
    try:
        with pytest.raises(NumericsError, match="a NaN or an infinity"):
            engine.forward(some_ids(weights, 9))
        assert engine.position == 0
    finally:
        engine.close()


def test_what_is_refused(cuda_lib: CudaLib) -> None:
    """Nothing is launched for a prompt that does not fit, nor without buffers."""
    weights = small("plain", "q8")
    engine = cuda_engine(weights, ctx_size=20, kv="f16")
    try:
        handle = engine.handle
        assert handle is not None
        before = native.prof_read(handle)
        with pytest.raises(ContextError, match="21"):
            engine.forward(some_ids(weights, 21))
        step = native.Step(engine.vocab_size)
        with pytest.raises(NativeError, match="21 tokens at position 0 do not fit the ctx_size"):
            native.dev_prefill(handle, step, 0, some_ids(weights, 21), abi.OUT_NONE)
        assert native.prof_read(handle).launches == before.launches

        config = replace(engine.device_config, prefill_rows=-1)
        with pytest.raises(NativeError, match=r"config.prefill_rows is -1; it must be 0 to 65536"):
            native.decode_size(config)
        with_buffers = native.decode_size(engine.device_config)
        unused = replace(engine.device_config, experts=4, experts_per_token=2**31 - 1)
        assert native.decode_size(unused) == with_buffers  # no layer has experts
        assert native.decode_size(replace(config, prefill_rows=0)) < with_buffers
    finally:
        engine.close()
