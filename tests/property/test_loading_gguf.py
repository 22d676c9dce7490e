"""GGUF files hold the same models as the directories, and no file can do harm."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import DATA, differences, make_gguf

from pykestrel.config import RopeConfig
from pykestrel.errors import KestrelError, ModelError
from pykestrel.loading import describe, load_weights, read_config, resolve_model
from pykestrel.quant import bf16_to_f32

gguf = pytest.importorskip("gguf")

CASES = ("llama-gqa3", "qwen2", "qwen3-tied", "qwen3-untied", "qwen3-moe")


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("case", CASES)
def test_a_gguf_holds_the_same_model(case: str, quant: str, tmp_path: Path) -> None:
    want = load_weights(resolve_model(DATA / case), quant)
    source = resolve_model(make_gguf(case, tmp_path / "m.gguf"))
    got = load_weights(source, quant)
    assert differences(want, got) == []
    assert got.config == want.config
    assert describe(source).parameters == describe(resolve_model(DATA / case)).parameters


def test_blocks_are_decoded_as_the_gguf_package_does(tmp_path: Path) -> None:
    path = make_gguf("qwen2", tmp_path / "m.gguf", kind="Q8_0")
    up = load_weights(resolve_model(path), "bf16").layers[1].up
    assert isinstance(up, np.ndarray)
    original = load_weights(resolve_model(DATA / "qwen2"), "bf16").layers[1].up
    assert isinstance(original, np.ndarray)
    raw = gguf.quants.quantize(bf16_to_f32(original), gguf.GGMLQuantizationType.Q8_0)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    assert np.abs(bf16_to_f32(up) - values).max() <= np.abs(values).max() / 256


def test_fused_expert_stacks(tmp_path: Path) -> None:
    from model_files import gguf_tensors

    want = load_weights(resolve_model(DATA / "qwen3-moe"), "bf16")
    tensors = gguf_tensors("qwen3-moe", "qwen3moe", 4, 2)
    writer_tensors: dict[str, Any] = {}
    for layer in range(3):
        gate = tensors[f"blk.{layer}.ffn_gate_exps.weight"]
        up = tensors[f"blk.{layer}.ffn_up_exps.weight"]
        name = f"blk.{layer}.ffn_gate_up_exps.weight"
        writer_tensors[name] = np.concatenate([gate, up], axis=1)
    path = make_gguf("qwen3-moe", tmp_path / "m.gguf", extra=writer_tensors, leave_out="_exps")
    assert differences(want, load_weights(resolve_model(path), "bf16")) == []


def test_strings_come_out_as_they_went_in(tmp_path: Path) -> None:
    tokens = ["", "a", "é", "日本", "\n", "x" * 5000]
    path = make_gguf("qwen2", tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    metadata = resolve_model(path).gguf().metadata
    assert metadata.length("tokenizer.ggml.tokens") == len(tokens)
    assert metadata["tokenizer.ggml.tokens"] == tokens
    assert metadata["general.architecture"] == "qwen2"
    assert metadata["qwen2.attention.layer_norm_rms_epsilon"] == 1e-6
    assert metadata.get("nothing") is None


# ----- settings ----------------------------------------------------------------------------------


def config_of(path: Path) -> Any:
    return read_config(resolve_model(path))


def test_rope_scaling(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = "{arch}.rope.scaling."
    make_gguf("qwen2", path, metadata={key + "type": "linear", key + "factor": 4.0})
    assert config_of(path).rope == RopeConfig("linear", 1e6, 4.0)
    make_gguf("qwen2", path, metadata={key + "factor": 4.0})
    assert config_of(path).rope == RopeConfig("linear", 1e6, 4.0)
    make_gguf("qwen2", path, metadata={key + "type": "none"})
    assert config_of(path).rope == RopeConfig("default", 1e6)
    yarn = {
        key + "type": "yarn",
        key + "factor": 4.0,
        key + "original_context_length": 128,
        key + "yarn_beta_fast": 16.0,
    }
    make_gguf("qwen2", path, metadata=yarn)
    assert config_of(path).rope == RopeConfig("yarn", 1e6, 4.0, 128, beta_fast=16.0)
    for bad in ({key + "type": "longrope", key + "factor": 4.0}, {key + "attn_factor": 0.5}):
        make_gguf("qwen2", path, metadata={**yarn, **bad})
        with pytest.raises(ModelError):
            config_of(path)


def llama3_factors(theta: float, dim: int, factor: float) -> np.ndarray[Any, Any]:
    """What the converter of llama.cpp writes, step by step."""
    result = []
    for freq in 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        wavelen = 2 * np.pi / freq
        if wavelen < 8192 / 4.0:
            result.append(1.0)
        elif wavelen > 8192 / 1.0:
            result.append(factor)
        else:
            smooth = (8192 / wavelen - 1.0) / (4.0 - 1.0)
            result.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(result, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequency_factors_become_llama3_rope(factor: float, tmp_path: Path) -> None:
    path, theta = tmp_path / "m.gguf", 500000.0
    factors = llama3_factors(theta, 16, factor)
    metadata = {"{arch}.rope.freq_base": theta}
    make_gguf("llama-gqa3", path, metadata=metadata, extra={"rope_freqs.weight": factors})
    assert config_of(path).rope == RopeConfig("llama3", theta, factor, 8192, 1.0, 4.0)
    load_weights(resolve_model(path), "bf16")
    factors[3] *= 1.01
    make_gguf("llama-gqa3", path, metadata=metadata, extra={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match="rope_freqs"):
        config_of(path)
    ones = np.ones(8, np.float32)
    make_gguf("llama-gqa3", path, metadata=metadata, extra={"rope_freqs.weight": ones})
    assert config_of(path).rope == RopeConfig("default", theta)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("{arch}.attention.scale", 0.1),
        ("{arch}.attention.causal", False),
        ("{arch}.attention.sliding_window", 64),
        ("{arch}.rope.dimension_count", 8),
        ("{arch}.attention.value_length", 8),
        ("{arch}.attn_logit_softcapping", 30.0),
        ("{arch}.expert_count", 4),
        ("{arch}.logit_scale", 2.0),
        ("{arch}.attention.head_count", "four"),
        ("{arch}.block_count", 4),
        ("{arch}.block_count", None),
        ("{arch}.rope.freq_base", None),
        ("general.architecture", "gpt2"),
        ("split.count", 3),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = make_gguf("qwen2", tmp_path / "m.gguf", metadata={key: value})
    with pytest.raises(ModelError):
        load_weights(resolve_model(path), "bf16")


def test_extra_and_missing_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_gguf("qwen2", path, extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match="attn_sinks"):
        load_weights(resolve_model(path), "bf16")
    make_gguf("qwen2", path, leave_out="blk.2.ffn_down")
    with pytest.raises(ModelError, match=r"blk\.2\.ffn_down"):
        load_weights(resolve_model(path), "bf16")
    bad = np.full((96, 64), np.nan, np.float32)
    make_gguf("qwen2", path, extra={"blk.1.ffn_up.weight": bad})
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
        load_weights(resolve_model(path), "q8")


# ----- damage ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound() -> Iterator[tuple[Path, bytes]]:
    with tempfile.TemporaryDirectory() as name:
        path = make_gguf("qwen3-tied", Path(name) / "m.gguf", kind="Q8_0")
        yield path, path.read_bytes()


def outcome(path: Path) -> str | None:
    """None if it loads, else the message; any other exception fails the test."""
    try:
        load_weights(resolve_model(path), "bf16")
    except KestrelError as error:
        return str(error)
    return None


@given(data=st.data())
def test_a_damaged_header_loads_or_is_refused(
    sound: tuple[Path, bytes], data: st.DataObject
) -> None:
    path, raw = sound
    # the header is what lies before the tensors: some 9 KB here
    at = data.draw(st.integers(0, 11_000))
    new = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8) | st.just(bytes(8)))
    path.write_bytes(raw[:at] + new + raw[at + len(new) :])
    message = outcome(path)
    assert message is None or (message.isprintable() and len(message) < 1500)


@given(data=st.data())
def test_inserted_and_deleted_bytes(sound: tuple[Path, bytes], data: st.DataObject) -> None:
    path, raw = sound
    at = data.draw(st.integers(0, 11_000))
    cut = data.draw(st.integers(0, 40))
    path.write_bytes(raw[:at] + data.draw(st.binary(max_size=40)) + raw[at + cut :])
    outcome(path)


@given(data=st.data())
def test_a_truncated_gguf_is_refused(sound: tuple[Path, bytes], data: st.DataObject) -> None:
    path, raw = sound
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    message = outcome(path)
    assert message is not None
    assert str(path) in message


@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic(body: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "m.gguf"
        path.write_bytes(b"GGUF\x03\x00\x00\x00" + body)
        assert outcome(path) is not None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"GGUF", "bytes long"),
        (b"GGML" + bytes(60), "no GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(40), "9223372036854775808 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40) + bytes(40), "1099511627776 metadata"),
        (b"version https://git-lfs.example/spec/v1\noid sha256:0", "Git LFS"),
    ],
)
def test_what_is_wrong_is_said(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    message = outcome(path)
    assert message is not None
    assert words in message
    assert str(path) in message


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IQ", 8, 2**62),  # strings without end
        struct.pack("<IQ", 0, 2**62),  # bytes without end
        struct.pack("<IQ", 9, 1) * 500,  # arrays of arrays of ...
        struct.pack("<IQQ", 8, 1, 2**63) + b"x",  # one endless string
        struct.pack("<IQ", 77, 1) + bytes(40),
    ],
)
def test_hostile_arrays(value: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field(b"a", 9, value) + bytes(64)
    path.write_bytes(raw)
    assert outcome(path) is not None


@pytest.mark.parametrize(
    "dims", [(2**32, 2**32), (0,), (2**63, 2), (7, 3), (1,) * 9, (32, 2**40), ()]
)
def test_hostile_shapes(dims: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    name = b"token_embd.weight"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    tensor += b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", 8, 0)
    raw = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + field(b"a", 4, bytes(4)) + tensor + bytes(256)
    path.write_bytes(raw)
    assert outcome(path) is not None


def test_the_package_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = make_gguf("qwen2", tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r'pip install "pykestrel\[gguf\]"'):
        resolve_model(path).gguf()
