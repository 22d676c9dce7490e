"""Weights from safetensors files: every layout gives the same, every damage is found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import (
    CASES,
    DATA,
    bf16_values,
    copy_model,
    differences,
    edit_config,
    edit_tensors,
    read_safetensors,
    shard_model,
    to_f32,
    write_safetensors,
)

from pykestrel.errors import KestrelError, ModelError, OutOfMemory
from pykestrel.loading import describe, load_weights, read_config, resolve_model
from pykestrel.loading.families import Target, make_plan
from pykestrel.loading.load import read_tensors, run_jobs
from pykestrel.loading.safetensors_file import read_header
from pykestrel.weights import ModelWeights


def load(path: Path, quant: str = "bf16") -> ModelWeights:
    return load_weights(resolve_model(path), quant)


# ----- layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("case", CASES)
def test_shards_hold_the_same_model(case: str, quant: str, tmp_path: Path) -> None:
    whole = load(copy_model(case, tmp_path / "a"), quant)
    shard_model(copy_model(case, tmp_path / "b"))
    assert differences(whole, load(tmp_path / "b", quant)) == []


@pytest.mark.parametrize("case", ["qwen2", "qwen3-moe"])
def test_float32_and_mixed_files_hold_the_same_model(case: str, tmp_path: Path) -> None:
    directory = copy_model(case, tmp_path / "m")
    want = {q: load(directory, q) for q in ("bf16", "q8", "q4")}
    tensors = read_safetensors(directory / "model.safetensors")
    mixed = {n: to_f32(t) if i % 2 else t for i, (n, t) in enumerate(tensors.items())}
    for form in ({n: to_f32(t) for n, t in tensors.items()}, mixed):
        write_safetensors(directory / "model.safetensors", form)
        for quant, weights in want.items():
            assert differences(weights, load(directory, quant)) == []


def test_float16_is_rounded_to_bf16(tmp_path: Path) -> None:
    directory = copy_model("qwen2", tmp_path / "m")
    name = "model.layers.1.mlp.up_proj.weight"
    values = np.linspace(-3, 3, 96 * 64, dtype=np.float16).reshape(96, 64)
    edit_tensors(directory, **{name.replace(".", "__"): ("F16", (96, 64), values.tobytes())})
    up = load(directory).layers[1].up
    assert isinstance(up, np.ndarray)
    got = (up.astype(np.uint32) << 16).view(np.float32)
    assert np.all(np.abs(got - values) <= np.abs(values) / 256)


@pytest.mark.parametrize(
    "prefix", ["model.language_model.", "language_model.model.", "language_model.", ""]
)
@pytest.mark.parametrize("case", ["qwen3-untied", "qwen3-moe", "qwen3-vl-text"])
def test_every_prefix_is_found(case: str, prefix: str, tmp_path: Path) -> None:
    directory = copy_model(case, tmp_path / "m")
    want = load(directory)
    tensors = read_safetensors(directory / "model.safetensors")
    old = "model.language_model." if case == "qwen3-vl-text" else "model."
    head = "language_model.lm_head.weight" if prefix.endswith("model.model.") else "lm_head.weight"
    renamed = {
        head if n == "lm_head.weight" else n.replace(old, prefix, 1) if n.startswith(old) else n: t
        for n, t in tensors.items()
    }
    write_safetensors(directory / "model.safetensors", renamed)
    assert differences(want, load(directory)) == []


def fuse_experts(directory: Path, *, transposed: bool) -> None:
    """One tensor an expert to gate_up_proj and down_proj stacks."""
    tensors = read_safetensors(directory / "model.safetensors")
    rest = {n: t for n, t in tensors.items() if ".experts." not in n}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."

        def stack(proj: str, prefix: str = prefix) -> np.ndarray[Any, Any]:
            parts = [tensors[f"{prefix}{e}.{proj}.weight"] for e in range(8)]
            return np.stack([np.frombuffer(d, "<u2").reshape(s) for _, s, d in parts])

        both = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
        for name, values in (("gate_up_proj", both), ("down_proj", stack("down_proj"))):
            if transposed:
                values = values.swapaxes(1, 2)
            rest[prefix + name] = ("BF16", values.shape, np.ascontiguousarray(values).tobytes())
    write_safetensors(directory / "model.safetensors", rest)


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_hold_the_same_model(transposed: bool, quant: str, tmp_path: Path) -> None:
    # hidden_size 64 is twice the width 32, so gate_up alone could be read either way
    directory = copy_model("qwen3-moe", tmp_path / "m")
    want = load(directory, quant)
    fuse_experts(directory, transposed=transposed)
    assert differences(want, load(directory, quant)) == []


def test_fused_experts_that_disagree_are_refused(tmp_path: Path) -> None:
    directory = copy_model("qwen3-moe", tmp_path / "m")
    fuse_experts(directory, transposed=False)
    name = "model.layers.1.mlp.experts.down_proj"
    _, shape, data = read_safetensors(directory / "model.safetensors")[name]
    key = name.replace(".", "__")
    edit_tensors(directory, **{key: ("BF16", (2 * shape[0], shape[1] // 2, shape[2]), data)})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.down_proj has shape"):
        load(directory)
    edit_tensors(directory, **{key: None})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        load(directory)


# ----- what is extra, what is missing ------------------------------------------------------------


def test_a_tied_head_may_be_in_the_file_again(tmp_path: Path) -> None:
    directory = copy_model("qwen3-tied", tmp_path / "m")
    want = load(directory)
    embed = read_safetensors(directory / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(directory, lm_head__weight=embed)
    assert differences(want, load(directory)) == []
    other = (embed[0], embed[1], bytes(2) + embed[2][2:])
    edit_tensors(directory, lm_head__weight=other)
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load(directory)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    directory = copy_model("qwen3-untied", tmp_path / "m")
    edit_tensors(directory, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(directory)


def test_buffers_are_accounted_for_and_strangers_are_not(tmp_path: Path) -> None:
    directory = copy_model("llama-gqa3", tmp_path / "m")
    want = load(directory)
    buffer = ("F32", (8,), bytes(32))
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    edit_tensors(directory, **{name: buffer})
    assert differences(want, load(directory)) == []
    for stranger in (
        "model.layers.0.self_attn.sinks",
        "model.layers.3.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.up_proj.weight_scale",
        "visual.blocks.0.attn.proj.bias",
        "score.weight",
    ):
        copy_model("llama-gqa3", directory)
        edit_tensors(directory, **{stranger.replace(".", "__"): buffer})
        with pytest.raises(ModelError, match=stranger.replace(".", r"\.")):
            load(directory)


def test_the_vision_tower_is_skipped_and_said_so(tmp_path: Path) -> None:
    info = describe(resolve_model(copy_model("qwen3-vl-text", tmp_path / "m")))
    assert len(info.skipped) == 27
    assert any("vision" in note for note in info.notes)
    assert info.parameters == 150144


def test_every_tensor_is_needed(tmp_path: Path) -> None:
    directory = copy_model("qwen3-moe", tmp_path / "m")
    tensors = read_safetensors(directory / "model.safetensors")
    for name in tensors:
        write_safetensors(
            directory / "model.safetensors", {n: t for n, t in tensors.items() if n != name}
        )
        with pytest.raises(ModelError) as caught:
            load(directory)
        assert name in str(caught.value)


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "I64"])
def test_other_dtypes_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    directory = copy_model("qwen2", tmp_path / "m")
    item = {"F64": 8, "I8": 1, "F8_E4M3": 1, "I64": 8}[dtype]
    key = "model__layers__2__mlp__down_proj__weight"
    edit_tensors(directory, **{key: (dtype, (64, 96), bytes(64 * 96 * item))})
    with pytest.raises(ModelError, match=rf"layers\.2\.mlp\.down_proj\.weight has dtype {dtype}"):
        load(directory)


@given(data=st.data())
def test_a_weight_that_is_not_finite_is_named(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = copy_model(data.draw(st.sampled_from(["qwen2", "qwen3-moe"])), Path(name))
        tensors = read_safetensors(directory / "model.safetensors")
        victim = data.draw(st.sampled_from(sorted(tensors)))
        as_f32 = data.draw(st.booleans())
        dtype, shape, raw = to_f32(tensors[victim]) if as_f32 else tensors[victim]
        item = 4 if as_f32 else 2
        at = item * data.draw(st.integers(0, len(raw) // item - 1))
        bad = data.draw(st.sampled_from([b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\x81\xff"]))
        raw = raw[: at + item - 2] + bad + raw[at + item :]
        tensors[victim] = (dtype, shape, raw)
        write_safetensors(directory / "model.safetensors", tensors)
        for quant in ("bf16", "q8", "q4"):
            with pytest.raises(ModelError) as caught:
                load(directory, quant)
            assert victim in str(caught.value)


# ----- damage ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def victim() -> Iterator[tuple[Path, bytes, ModelWeights]]:
    """A model directory, its weights as bytes, and as they were loaded."""
    with tempfile.TemporaryDirectory() as name:
        directory = copy_model("qwen2", Path(name))
        yield directory, (directory / "model.safetensors").read_bytes(), load(directory)


def outcome(directory: Path) -> ModelWeights | str:
    """The weights, or the message of the refusal; any other exception fails the test."""
    try:
        return load(directory)
    except KestrelError as error:
        return str(error)


@given(data=st.data())
def test_a_damaged_header_is_refused_or_harmless(
    victim: tuple[Path, bytes, ModelWeights], data: st.DataObject
) -> None:
    directory, raw, want = victim
    end = 8 + int.from_bytes(raw[:8], "little")
    at = data.draw(st.integers(0, end - 1))
    how = data.draw(st.sampled_from(["set", "insert", "delete", "flip"]))
    byte = data.draw(st.binary(min_size=1, max_size=1))
    if how == "set":
        damaged = raw[:at] + byte + raw[at + 1 :]
    elif how == "insert":
        damaged = raw[:at] + byte + raw[at:]
    elif how == "delete":
        damaged = raw[:at] + raw[at + 1 :]
    else:
        damaged = raw[:at] + bytes([raw[at] ^ 1 << data.draw(st.integers(0, 7))]) + raw[at + 1 :]
    (directory / "model.safetensors").write_bytes(damaged)
    got = outcome(directory)
    if isinstance(got, str):
        assert "model.safetensors" in got or str(directory) in got
        assert got.isprintable()
    else:
        assert differences(want, got) == []


@given(cut=st.integers(0, 230_839))
def test_a_truncated_file_is_refused(victim: tuple[Path, bytes, ModelWeights], cut: int) -> None:
    directory, raw, _ = victim
    (directory / "model.safetensors").write_bytes(raw[:cut])
    got = outcome(directory)
    assert isinstance(got, str)
    assert "model.safetensors" in got


@given(data=st.data())
def test_a_damaged_weight_changes_itself_only(
    victim: tuple[Path, bytes, ModelWeights], data: st.DataObject
) -> None:
    directory, raw, want = victim
    start = 8 + int.from_bytes(raw[:8], "little")
    at = data.draw(st.integers(start, len(raw) - 1))
    damaged = raw[:at] + data.draw(st.binary(min_size=1, max_size=1)) + raw[at + 1 :]
    (directory / "model.safetensors").write_bytes(damaged)
    got = outcome(directory)
    if isinstance(got, str):
        assert "NaN or infinite" in got
    else:
        assert len(differences(want, got)) <= 1


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "F4", "X", 3, None]),
        "shape": st.one_of(
            st.lists(st.integers(-2, 2**64), max_size=3), st.just([2, 2]), st.text(max_size=2)
        ),
        "data_offsets": st.one_of(
            st.lists(st.integers(-1, 40), max_size=3), st.just([0, 8]), st.just([0, 2**63])
        ),
        "more": st.none(),
    },
)


@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]), st.one_of(ENTRY, st.none(), st.integers())
    ),
    length=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    body=st.binary(max_size=40),
)
def test_any_header_is_checked(header: Any, length: int | None, body: bytes) -> None:
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "x.safetensors"
        path.write_bytes(size.to_bytes(8, "little") + text + body)
        try:
            table, _ = read_header(path)
        except KestrelError:
            return
        assert sum(info.nbytes for info in table.values()) == len(body)


@given(data=st.data())
def test_a_damaged_index_is_refused_or_harmless(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = copy_model("qwen2", Path(name))
        want = load(directory)
        shards = shard_model(directory)
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        names = sorted(index["weight_map"])
        for _ in range(data.draw(st.integers(1, 3))):
            key = data.draw(st.sampled_from(names))
            value = data.draw(
                st.sampled_from([s.name for s in shards])
                | st.none()
                | st.text(max_size=8)
                | st.just("../model.safetensors")
            )
            if data.draw(st.booleans()):
                index["weight_map"][key] = value
            else:
                index["weight_map"].pop(key, None)
        path.write_text(json.dumps(index))
        got = outcome(directory)
        assert isinstance(got, str) or differences(want, got) == []


@pytest.mark.parametrize(
    "name",
    [
        "../model-00001-of-00003.safetensors",
        "sub/model-00001-of-00003.safetensors",
        "/etc/passwd",
        "C:\\x.safetensors",
        "..",
        "",
        ".hidden.safetensors",
        "model.bin",
        "a\n.safetensors",
        "x" * 300 + ".safetensors",
    ],
)
def test_shards_stay_in_the_directory(name: str, tmp_path: Path) -> None:
    directory = copy_model("qwen2", tmp_path / "m")
    shards = shard_model(directory)
    shutil.copy(shards[0], tmp_path)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(n for n, s in index["weight_map"].items() if s == shards[0].name)
    index["weight_map"][first] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="same directory"):
        load(directory)


def test_nothing_is_allocated_for_a_model_that_is_not_there(tmp_path: Path) -> None:
    directory = copy_model("qwen2", tmp_path / "m")
    edit_config(directory, vocab_size=1 << 26, num_hidden_layers=10_000, layer_types=...)
    with pytest.raises(ModelError, match="embed_tokens"):
        load(directory)


def test_progress_reaches_the_end_and_may_stop_the_work(tmp_path: Path) -> None:
    source = resolve_model(copy_model("qwen3-moe", tmp_path / "m"))
    seen: list[tuple[str, int, int]] = []
    load_weights(source, "q8", lambda *step: seen.append(step))
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][2] == 528640

    def stop(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_weights(source, "q8", stop)


def test_values_of_the_golden_files_are_bf16(tmp_path: Path) -> None:
    # what the other tests rely on: F32 copies of these files round to the same bits
    tensors = read_safetensors(copy_model("qwen2", tmp_path) / "model.safetensors")
    assert all(dtype == "BF16" for dtype, _, _ in tensors.values())
    assert np.isfinite(bf16_values(tensors["model.norm.weight"][2])).all()


def test_a_model_larger_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model(copy_model("qwen3-moe", tmp_path / "m"))
    for available, words in ((200_000, "q4 needs 0.00 GB"), (1000, "smaller model")):
        monkeypatch.setattr("pykestrel.loading.load.memory", lambda a=available: {"available": a})
        with pytest.raises(OutOfMemory, match=words):
            load_weights(source, "bf16")


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_however_often_one_interrupts_no_worker_is_left() -> None:
    """What they write to may be freed when `run_jobs` has ended: a GPU's memory is."""
    source = resolve_model(DATA / "qwen3-tied")
    plan = make_plan(read_config(source), read_tensors(source), source.path)
    started: list[Target] = []
    ended: list[Target] = []

    def work(target: Target, report: Any) -> None:
        started.append(target)
        report(1)
        time.sleep(0.3)
        ended.append(target)

    def stop(name: str, done: int, total: int) -> None:
        for delay in (0.05, 0.1, 0.15):
            threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT]).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(plan.targets, work, 1, stop, 0)
    assert len(started) == len(ended) > 0
