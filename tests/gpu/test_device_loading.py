"""What is loaded on the device is, byte for byte, what the CPU's loader makes of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import copy_model, edit_tensors, make_gguf, read_safetensors, to_f32

import pykestrel
from pykestrel import native
from pykestrel.engine.cuda import entries, place
from pykestrel.errors import ModelError, UsageError
from pykestrel.loading import load_weights, read_config, resolve_model, save_quantized
from pykestrel.loading.families import MATRICES
from pykestrel.loading.on_device import load_on_device
from pykestrel.quant import QTensor
from pykestrel.weights import ModelWeights

from .conftest import CudaLib
from .device_models import CASES, DATA

pytestmark = pytest.mark.usefixtures("nothing_left")


def same_as_on_the_cpu(path: Path, quant: str) -> None:
    source = resolve_model(str(path))
    config = read_config(source)
    weights = load_weights(source, quant)
    seen: list[int] = []
    with native.create(0) as handle:
        small = load_on_device(
            source, config, quant, handle, lambda name, done, total: seen.append(done)
        )
        check_matrices(handle, weights)
        info = native.cache_stats(handle)
        expected = entries(config, quant)
        assert info.entries == info.uploads == len(expected)
        assert info.bytes == info.pinned_bytes
        assert info.bytes == sum(native.cache_size(entry.matrix) for entry in expected)
    assert np.array_equal(small.final_norm, weights.final_norm)
    for i, layer in enumerate(weights.layers):
        rest = {n: v for n, v in vars(layer).items() if v is not None and n not in MATRICES}
        rest.pop("router", None)
        assert rest.keys() == small.layers[i].keys()
        assert all(np.array_equal(rest[name], small.layers[i][name]) for name in rest)
    assert seen == sorted(seen)
    assert seen[-1] > 0


def check_matrices(handle: native.Handle, weights: ModelWeights) -> None:
    def check(layer: int | None, field: str, value: Any) -> None:
        where, proj, first = place(weights.config, layer, field)
        rows = int(np.prod(value.shape[:-1]))
        codes, scales = native.cache_read(handle, native.wkey(where, proj), first, rows)
        if isinstance(value, QTensor):
            assert np.array_equal(codes, value.codes.reshape(rows, -1)), (layer, field)
            assert scales is not None
            assert np.array_equal(scales, value.scales.reshape(rows, -1)), (layer, field)
        else:
            assert np.array_equal(codes, value.reshape(rows, -1)), (layer, field)

    check(None, "embed", weights.embed)
    if weights.head is not None:
        check(None, "head", weights.head)
    for i, layer in enumerate(weights.layers):
        for field in (*MATRICES, "router"):
            if getattr(layer, field, None) is not None:
                check(i, field, getattr(layer, field))


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("case", CASES)
def test_golden_files(cuda_lib: CudaLib, case: str, quant: str) -> None:
    same_as_on_the_cpu(DATA / case, quant)


@pytest.mark.parametrize("quant", ["q8", "q4"])
@pytest.mark.parametrize("case", ["qwen3-moe-mixed", "llama-gqa3"])
def test_quantised_directories(cuda_lib: CudaLib, case: str, quant: str, tmp_path: Path) -> None:
    save_quantized(resolve_model(str(DATA / case)), tmp_path / "out", quant)
    same_as_on_the_cpu(tmp_path / "out", quant)


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize(("case", "kind"), [("llama-gqa3", "F32"), ("qwen3-moe", "Q8_0")])
def test_gguf_files(cuda_lib: CudaLib, case: str, kind: str, quant: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    same_as_on_the_cpu(make_gguf(case, tmp_path / "model.gguf", kind=kind), quant)


def test_files_of_other_dtypes(cuda_lib: CudaLib, tmp_path: Path) -> None:
    directory = copy_model("qwen3-tied", tmp_path / "model")
    tensors = read_safetensors(directory / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"  # one of the three parts of an entry
    edit_tensors(directory, **{name.replace(".", "__"): to_f32(tensors[name])})
    for quant in ("bf16", "q4"):
        same_as_on_the_cpu(directory, quant)


@pytest.mark.parametrize("quant", ["bf16", "q8"])
@pytest.mark.parametrize("part", ["mlp.down", "mlp.gate", "self_attn.q", "self_attn.k"])
def test_a_nan_in_a_file_is_named(cuda_lib: CudaLib, part: str, quant: str, tmp_path: Path) -> None:
    directory = copy_model("qwen3-tied", tmp_path / "model")
    tensors = read_safetensors(directory / "model.safetensors")
    name = f"model.layers.1.{part}_proj.weight"  # also of an entry of several weights
    dtype, shape, data = tensors[name]
    bad = dtype, shape, b"\xc0\x7f" + data[2:]
    edit_tensors(directory, **{name.replace(".", "__"): bad})
    said = []
    for device in ("cuda", "cpu"):
        with pytest.raises(ModelError) as caught:
            pykestrel.load(directory, device=device, quant=quant)
        said.append(str(caught.value))
    assert f"model.safetensors: {name} holds a NaN or infinite weight" in said[0]
    assert said[0] == said[1]


def test_auto_takes_the_gpu(cuda_lib: CudaLib) -> None:
    with pykestrel.load(DATA / "qwen3-tied") as model:
        assert model.engine.name == "cuda"
        assert model.quant == "q8"
        assert str(model.engine).startswith("cuda (")
        assert model.traffic.weights >= model.traffic.token > 0
    with pytest.raises(UsageError, match="prefill must be one of auto, cpu, cuda"):
        pykestrel.load(DATA / "qwen3-tied", prefill="gpu")
