"""Any configuration: its tensors load, are saved in every form, and load the same again."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import Tensor, bf16_values, differences, write_safetensors

from pykestrel.config import ModelConfig
from pykestrel.errors import ModelError
from pykestrel.loading import describe, load_weights, resolve_model, save_quantized
from pykestrel.loading.families import HF_EXPERT, canonical_name, expected_shapes
from pykestrel.quant import bf16_to_f32, quantize_bf16

TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A small config.json of any family, with sizes that are multiples of nothing."""
    model_type = draw(st.sampled_from(TYPES))
    kv = draw(st.integers(1, 3))
    layers = draw(st.integers(1, 4))
    d: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": draw(st.integers(1, 70)),
        "intermediate_size": draw(st.integers(1, 70)),
        "num_hidden_layers": layers,
        "num_attention_heads": kv * draw(st.integers(1, 3)),
        "num_key_value_heads": kv,
        "head_dim": 2 * draw(st.integers(1, 20)),
        "vocab_size": draw(st.integers(1, 50)),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_theta": 1e6,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if model_type != "qwen2":
        d["attention_bias"] = draw(st.booleans())
    if model_type == "llama":
        d["mlp_bias"] = draw(st.booleans())
    if model_type == "qwen3_moe":
        d["num_experts"] = draw(st.integers(1, 5))
        d["num_experts_per_tok"] = draw(st.integers(1, d["num_experts"]))
        d["moe_intermediate_size"] = draw(st.integers(1, 40))
        d["decoder_sparse_step"] = draw(st.integers(1, 3))
        d["mlp_only_layers"] = draw(st.lists(st.integers(0, layers - 1), max_size=2))
    return d


def make_model(directory: Path, d: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Random BF16 weights for a configuration, one tensor an expert."""
    (directory / "config.json").write_text(json.dumps(d))
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for layer, name, shape in expected_shapes(ModelConfig.from_dict(d, "c")):
        # magnitudes of 2**-6 to 2: none is NaN, and signs and mantissas are arbitrary
        exponents = rng.integers(121, 128, shape, dtype=np.uint16) << 7
        bits = exponents | rng.integers(0, 2, shape, dtype=np.uint16) << 15
        bits |= rng.integers(0, 128, shape, dtype=np.uint16)
        full = canonical_name(layer, name, False)
        if len(shape) == 3:
            for e in range(shape[0]):
                expert = f"model.layers.{layer}." + HF_EXPERT[name].format(e=e)
                tensors[expert] = ("BF16", shape[1:], bits[e].tobytes())
        else:
            tensors[full] = ("BF16", shape, bits.tobytes())
    write_safetensors(directory / "model.safetensors", tensors)
    return tensors


@settings(max_examples=60)
@given(d=configs(), seed=st.integers(0, 2**32 - 1), quant=st.sampled_from(["bf16", "q8", "q4"]))
def test_every_form_holds_the_same_model(d: dict[str, Any], seed: int, quant: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        original, saved = Path(name) / "m", Path(name) / "saved"
        original.mkdir()
        tensors = make_model(original, d, seed)
        source = resolve_model(original)
        weights = load_weights(source, quant)
        stored = sum(int(np.prod(shape)) for _, shape, _ in tensors.values())
        assert describe(source).parameters == stored
        save_quantized(source, saved, quant)
        assert differences(weights, load_weights(resolve_model(saved), quant)) == []
        # and the values are those of the file
        for layer, w in enumerate(weights.layers):
            prefix = f"model.layers.{layer}."
            for field, key in (
                ("q", "self_attn.q_proj.weight"),
                ("input_norm", "input_layernorm.weight"),
            ):
                _, shape, raw = tensors[prefix + key]
                bits = np.frombuffer(raw, np.uint16).reshape(shape)
                got: Any = getattr(w, field)
                if field == "input_norm":
                    assert np.array_equal(got, bf16_values(raw))
                elif quant == "bf16":
                    assert np.array_equal(got, bits)
                else:
                    assert np.array_equal(got.codes, quantize_bf16(bits, quant).codes)
            assert (w.router is None) == (not weights.config.layer_is_moe[layer])
            if w.router is not None:
                experts = weights.config.num_experts
                assert w.gate.shape == (experts, d["moe_intermediate_size"], d["hidden_size"])
                _, shape, raw = tensors[f"{prefix}mlp.experts.{experts - 1}.down_proj.weight"]
                if quant == "bf16":
                    assert isinstance(w.down, np.ndarray)
                    want = bf16_values(raw).reshape(shape)
                    assert np.array_equal(bf16_to_f32(w.down[-1]), want)


@settings(max_examples=30)
@given(d=configs(), data=st.data())
def test_no_tensor_can_be_missing_or_foreign(d: dict[str, Any], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tensors = make_model(directory, d, 0)
        victim = data.draw(st.sampled_from(sorted(tensors)))
        changed = {n: t for n, t in tensors.items() if n != victim}
        write_safetensors(directory / "model.safetensors", changed)
        with pytest.raises(ModelError, match=victim.replace(".", r"\.")):
            load_weights(resolve_model(directory))
        renamed = {**changed, victim + "_": tensors[victim], victim: tensors[victim]}
        write_safetensors(directory / "model.safetensors", renamed)
        with pytest.raises(ModelError, match=victim.replace(".", r"\.") + "_"):
            load_weights(resolve_model(directory))
