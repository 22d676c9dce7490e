"""The Python functions over the C interface: what they refuse before C sees a pointer, and what
they give back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_models import make_config, make_weights

from pykestrel import native
from pykestrel.engine.cuda import CudaEngine, SmallWeights
from pykestrel.engine.cuda.plan import decode_config
from pykestrel.errors import NativeError, UsageError
from pykestrel.native import Matrix, Proj, abi
from pykestrel.native.decode import DecodeConfig, KVRows
from pykestrel.quant import quantize
from pykestrel.rope import rope_table

from .conftest import CudaLib
from .device_models import cuda_engine

MATRIX = Matrix("q8", 1, 8, 64)


@pytest.fixture
def rows() -> tuple[Any, Any]:
    q = quantize(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32), "q8")
    return q.codes, q.scales


def test_an_entry_from_its_begin_to_its_end(handle: native.Handle, rows: tuple[Any, Any]) -> None:
    key = native.wkey(3, Proj.O)
    codes, scales = rows
    native.cache_begin(handle, key, MATRIX, pinned=False)
    with pytest.raises(NativeError) as caught:
        native.cache_find(handle, key)  # not before it is complete
    assert caught.value.status == -1
    native.cache_rows(handle, key, MATRIX, 4, codes[4:], scales[4:])
    native.cache_rows(handle, key, MATRIX, 0, codes[:4], scales[:4])
    native.cache_end(handle, key)
    assert native.cache_find(handle, key) == MATRIX
    got, got_scales = native.cache_read(handle, key, 2, 5)
    assert np.array_equal(got, codes[2:7])
    assert got_scales is not None
    assert np.array_equal(got_scales, scales[2:7])
    info = native.cache_stats(handle)
    assert (info.entries, info.uploads, info.pinned_bytes) == (1, 1, 0)
    assert info.bytes == native.cache_size(MATRIX)
    native.cache_pin(handle, key)
    assert native.cache_stats(handle).pinned_bytes == info.bytes
    native.cache_budget(handle, info.bytes)
    with pytest.raises(NativeError):  # the pinned entry alone is over it
        native.cache_budget(handle, info.bytes - 1)
    native.cache_drop(handle, key)
    assert native.cache_stats(handle).entries == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, s: (c.astype(np.int16), s), r"q8 rows must be contiguous int8 \[8, 64\]"),
        (lambda c, s: (c[:, :32], s), r"got int8 \[8, 32\], not contiguous"),
        (lambda c, s: (c[::-1], s), "not contiguous"),
        (lambda c, s: (c, s[:, :1].copy()), r"scales must be contiguous float16 \[8, 2\]"),
        (lambda c, s: (c, None), "rows of kind q8 need scales"),
    ],
)
def test_wrong_rows_are_refused(
    handle: native.Handle, rows: tuple[Any, Any], change: Any, words: str
) -> None:
    key = native.wkey(0, Proj.O)
    native.cache_begin(handle, key, MATRIX)
    codes, scales = change(*rows)
    with pytest.raises(UsageError, match=words):
        native.cache_rows(handle, key, MATRIX, 0, codes, scales)
    with pytest.raises(UsageError, match="rows 1 to 9 are outside an entry of 8 rows"):
        native.cache_rows(handle, key, MATRIX, 1, *rows)
    with pytest.raises(UsageError, match="rows of kind bf16 have no scales"):
        native.cache_rows(handle, key, MATRIX, 0, *rows, source="bf16")
    with pytest.raises(UsageError, match="a source kind is one of"):
        native.cache_rows(handle, key, MATRIX, 0, *rows, source="q5")


def test_values_out_of_range(handle: native.Handle) -> None:
    with pytest.raises(UsageError, match="a matrix kind is one of"):
        native.cache_size(Matrix("q5", 1, 8, 8))
    with pytest.raises(UsageError, match="number of bytes"):
        native.cache_budget(handle, -1)
    native.cache_fill(handle, 5, MATRIX, seed=-1)
    with pytest.raises(UsageError, match="rows 5 to 9 are outside"):
        native.cache_read(handle, 5, 5, 4)
    with pytest.raises(UsageError, match=r"x must be contiguous float32 \[any, 64\]"):
        native.dev_gemm(handle, 5, np.zeros((1, 32), np.float32))


@pytest.fixture
def config() -> DecodeConfig:
    c = make_config()
    return decode_config(c, SmallWeights.plain(c), 16, "int8", rope_table(c, 16), "q8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv": "q4"}, "K/V is one of int8, f16, f32, got 'q4'"),
        ({"final_norm": np.ones(63, np.float32)}, r"final_norm must be contiguous float32 \[64\]"),
        ({"rope_cos": np.ones((8, 8), np.float32)}, r"rope_cos must be .* \[16, 8\], got"),
        ({"rope_sin": np.ones((16, 8))}, r"got float64 \[16, 8\]"),
    ],
)  # fmt: skip
def test_wrong_configurations_are_refused(
    handle: native.Handle, config: DecodeConfig, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        native.dev_decode_init(handle, replace(config, **changes))
    layers = [replace(config.layers[0], q_norm=np.ones(3, np.float32)), *config.layers[1:]]
    with pytest.raises(UsageError, match="q_norm must be"):
        native.dev_decode_init(handle, replace(config, layers=layers))


def test_k_v_rows_travel(handle: native.Handle, config: DecodeConfig) -> None:
    native.dev_decode_init(handle, config)
    rng = np.random.default_rng(0)
    rows = KVRows.empty("int8", 5, config.kv_heads, config.head_dim)
    for codes, scales in ((rows.k, rows.k_scales), (rows.v, rows.v_scales)):
        codes[...] = rng.integers(-127, 128, codes.shape)
        assert scales is not None
        scales[...] = rng.random(scales.shape)
    native.kv_write(handle, config, 1, 3, rows)
    assert native.kv_position(handle) == 0
    native.kv_seek(handle, 8)
    assert native.kv_position(handle) == 8
    got = native.kv_read(handle, config, 1, 3, 8)
    for name in ("k", "v", "k_scales", "v_scales"):
        assert np.array_equal(getattr(got, name), getattr(rows, name)), name
    with pytest.raises(NativeError, match=r"\[7, 12\) of the K/V cannot be written: it holds 8"):
        native.kv_write(handle, config, 1, 7, rows)
    with pytest.raises(UsageError, match="positions 12 to 17 of layer 1 are outside"):
        native.kv_write(handle, config, 1, 12, rows)
    with pytest.raises(UsageError, match="layer 2"):
        native.kv_read(handle, config, 2, 0, 1)
    with pytest.raises(UsageError, match="K/V of kind int8 has scales"):
        native.kv_write(handle, config, 0, 0, KVRows(rows.k, rows.v, None, None))
    native.dev_decode_free(handle)


def test_what_a_step_refuses(cuda_lib: CudaLib) -> None:
    engine = cuda_engine(make_weights(make_config(), "q8"), ctx_size=16)
    try:
        handle, step = engine.handle, native.Step(80)
        assert handle is not None
        with pytest.raises(UsageError, match="needs an array for the logits"):
            native.dev_decode_run(handle, step, 0, [1], abi.OUT_LOGITS)
        wrong = np.empty(79, np.float32)
        with pytest.raises(UsageError, match=r"logits must be contiguous float32 \[80\]"):
            native.dev_decode_run(handle, step, 0, [1], abi.OUT_LOGITS, logits=wrong)
        fixed = np.empty(80, np.float32)
        fixed.flags.writeable = False
        with pytest.raises(UsageError, match="can be written to"):
            native.dev_decode_run(handle, step, 0, [1], abi.OUT_LOGITS, logits=fixed)
        with pytest.raises(UsageError, match="between 1 and 1024 candidates"):
            native.dev_decode_run(handle, step, 0, [1], abi.OUT_TOP, top=1025)
        short = np.empty((1, 3), np.float32)
        with pytest.raises(UsageError, match="trace must be"):
            native.dev_decode_run(handle, step, 0, [1], abi.OUT_NONE, trace=short)
        assert native.kv_position(handle) == 0
        native.dev_decode_run(handle, step, 0, [1, 2], abi.OUT_GREEDY)
        assert native.kv_position(handle) == 2
        with pytest.raises(NativeError) as caught:
            native.dev_decode_run(handle, step, 1, [1], abi.OUT_GREEDY)  # it is at 2
        assert caught.value.status == -1
    finally:
        engine.close()


def test_prof_is_printed_when_a_model_is_closed(
    cuda_lib: CudaLib, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYKESTREL_PROF", "1")
    engine: CudaEngine = cuda_engine(make_weights(make_config(), "q8"), ctx_size=16)
    engine.forward([1, 2, 3])
    assert engine.handle is not None
    assert native.prof_read(engine.handle).attention.count == 2  # of two layers: one chunk
    assert capsys.readouterr().err == ""
    engine.close()
    engine.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "PROF qwen3: 3 tokens"
    assert lines[1].split() == ["phase", "count", "ms", "us/token", "share"]
    assert [line.split()[:2] for line in lines[2:11]] == [
        ["device", "gemm"], ["device", "reduce"], ["device", "attention"], ["device", "norm"],
        ["device", "moe"], ["host", "cache_probe"], ["host", "h2d"], ["host", "d2h_sync"],
        ["host", "upload"],
    ]  # fmt: skip
    assert "launches, 0.33 copies to the device and 0.33 from it a token" in lines[11]
    assert lines[10].split()[-2:] == ["-", "-"]  # an upload is no part of a token
    assert sum(float(line.split()[-2]) for line in lines[7:10]) == pytest.approx(100, abs=0.2)
    assert len(lines) == 12


def test_the_read_rate(handle: native.Handle, cuda_lib: CudaLib) -> None:
    if cuda_lib.fake is not None:
        cuda_lib.fake.skip_launches(True)  # a second a run, thread by thread
    rate = native.dev_bandwidth(handle, 1 << 28, 2)
    assert rate > 1e9
