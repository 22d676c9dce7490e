"""--verify finds nothing where nothing is wrong, and names what is."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from cpu_models import make_config, make_weights, moe_config

import pykestrel
from pykestrel import native
from pykestrel.engine.cuda import CudaEngine
from pykestrel.errors import NumericsError
from pykestrel.native import Proj

from .conftest import CudaLib
from .device_models import DATA, cuda_engine

pytestmark = pytest.mark.usefixtures("nothing_left")


def verified(quant: str, kv: str = "f16", experts: bool = False) -> CudaEngine:
    config = moe_config(layer_is_moe=(False, True)) if experts else make_config()
    return cuda_engine(make_weights(config, quant, seed=2), kv=kv, verify=True)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_it_is_silent_where_nothing_is_wrong(
    cuda_lib: CudaLib, quant: str, kv: str, experts: bool
) -> None:
    engine = verified(quant, kv, experts)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            whole = engine.forward([5, 6, 7], all_logits=True)
            engine.truncate(1)
            again = engine.forward([6, 7])
        assert np.array_equal(again, whole[2])
        assert engine.verifier is not None
        assert engine.verifier.tokens == 5
    finally:
        engine.close()


def corrupt(engine: CudaEngine, layer: int, proj: Proj, row: int, *, nan: bool = False) -> None:
    """Give an entry another row than the model has."""
    handle = engine.handle
    assert handle is not None
    key = native.wkey(layer, proj)
    matrix = native.cache_find(handle, key)
    codes, scales = native.cache_read(handle, key, 0, matrix.rows)
    codes = codes.copy()
    codes[row] = 0x7FC0 if nan else np.roll(codes[row], 1)
    native.cache_begin(handle, key, matrix)
    native.cache_rows(handle, key, matrix, 0, codes, scales)
    native.cache_end(handle, key)


@pytest.mark.parametrize(
    ("layer", "proj", "row", "quantity", "experts"),
    [
        (0, Proj.FUSED_QKV, 100, "qkv", False),
        (1, Proj.O, 17, "after_attention", False),
        (1, Proj.FUSED_GU, 30, "hidden", False),
        (0, Proj.DOWN, 3, "after_mlp", True),
        (1, Proj.ROUTER, 2, "router", True),
    ],
)
@pytest.mark.parametrize("quant", ["bf16", "q8"])
def test_a_wrong_weight_is_named(
    cuda_lib: CudaLib,
    quant: str,
    layer: int,
    proj: Proj,
    row: int,
    quantity: str,
    experts: bool,
) -> None:
    engine = verified(quant, experts=experts)
    try:
        engine.forward([5])
        corrupt(engine, layer, proj, row)
        with pytest.warns(UserWarning, match=f"in {quantity}.{row}. of layer {layer}: ") as caught:
            engine.forward([6, 7])
        assert len(caught) == 1
        assert engine.verifier is not None
        found = engine.verifier.difference
        assert found is not None
        assert (found.layer, found.quantity, found.index) == (layer, quantity, row)
        assert found.position in (1, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            engine.forward([8])
    finally:
        engine.close()


def test_where_a_nan_comes_from_is_named(cuda_lib: CudaLib) -> None:
    engine = verified("bf16")
    try:
        engine.forward([5])
        corrupt(engine, 1, Proj.O, 17, nan=True)
        with (
            pytest.warns(UserWarning, match=r"position 1 in after_attention\[17\] of layer 1: nan"),
            pytest.raises(NumericsError, match="on the GPU at position 1"),
        ):
            engine.forward([6])
        assert engine.position == 1
        assert engine.name == "cuda"
    finally:
        engine.close()


def test_a_wrong_head_shows_in_the_logits(cuda_lib: CudaLib) -> None:
    weights = make_weights(make_config(tie_word_embeddings=False), "q8", seed=2)
    engine = cuda_engine(weights, kv="f16", verify=True)
    try:
        corrupt(engine, native.HEAD_LAYER, Proj.HEAD, 40)
        with pytest.warns(UserWarning, match=r"position 0 in logits\[40\]: "):
            engine.forward([5])
    finally:
        engine.close()


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_it_can_be_asked_for(cuda_lib: CudaLib, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"verify": True}
    if how == "variable":
        monkeypatch.setenv("PYKESTREL_VERIFY", "1")
        options = {}
    with pykestrel.load(DATA / "llama-gqa3", device="cuda", **options) as model:
        made = model.generate([5, 6], max_tokens=3, temperature=0, ignore_eos=True)
        engine = model.session.engine
        assert isinstance(engine, CudaEngine)
        assert engine.verifier is not None
        assert engine.verifier.tokens == 4
        assert len(made.tokens) == 3
    with pytest.warns(UserWarning, match="nothing to verify"):
        pykestrel.load(DATA / "llama-gqa3", device="cpu", verify=True).close()


@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
def test_random_k_v_is_the_same_on_both(cuda_lib: CudaLib, kv: str) -> None:
    engine = verified("q8", kv)
    try:
        engine.forward([5, 6])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.fill(40)
            engine.forward([7, 8])
        assert engine.verifier is not None
        assert engine.verifier.cpu.position == engine.position == 42
    finally:
        engine.close()
