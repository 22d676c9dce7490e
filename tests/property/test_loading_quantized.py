"""Directories of quantised weights: written whole or not at all, read back to the byte."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
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
    copy_model,
    differences,
    edit_config,
    make_gguf,
    read_safetensors,
    write_safetensors,
)

from pykestrel.errors import KestrelError, ModelError, UsageError
from pykestrel.loading import describe, load_weights, quantized, resolve_model, save_quantized
from pykestrel.quant import QTensor

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_what_was_loaded(case: str, quant: str, tmp_path: Path) -> None:
    source = resolve_model(DATA / case)
    want = load_weights(source, quant)
    save_quantized(source, tmp_path / "out", quant)
    saved = resolve_model(tmp_path / "out")
    # a quantised directory says itself what it is; a plain one becomes q8 by default
    got = load_weights(saved, None if quant != "bf16" else "bf16")
    assert got.quant == quant
    assert got.config == want.config
    assert differences(want, got) == []
    info = describe(saved)
    assert info.stored_quant == (None if quant == "bf16" else quant)
    assert info.parameters == describe(source).parameters


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_shards(quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model(DATA / "qwen3-moe")
    want = load_weights(source, quant)
    monkeypatch.setattr(quantized, "SHARD_BYTES", 30_000)
    save_quantized(source, tmp_path / "out", quant)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files == names
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    got = load_weights(resolve_model(tmp_path / "out"), quant)
    assert differences(want, got) == []


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    from safetensors import safe_open

    source = resolve_model(DATA / "qwen3-tied")
    for quant in ("q8", "q4"):
        save_quantized(source, tmp_path / quant, quant)
        want = load_weights(source, quant).layers[1].down
        assert isinstance(want, QTensor)
        path = str(tmp_path / quant / "model.safetensors")
        with safe_open(path, framework="np") as file:
            assert file.metadata() == {
                "format": "pykestrel",
                "version": "1",
                "kind": quant,
                "group_size": "32",
            }
            name = "model.layers.1.mlp.down_proj.weight"
            assert np.array_equal(file.get_tensor(name + ".codes"), want.codes)
            assert np.array_equal(file.get_tensor(name + ".scales"), want.scales)


def test_companions_are_taken_along_and_others_are_not(tmp_path: Path) -> None:
    directory = copy_model("qwen2", tmp_path / "m")
    taken = (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "merges.txt",
        "LICENSE",
        "LICENSE.txt",
    )
    for name in (*taken, "pytorch_model.bin", "train.py", "README.md"):
        (directory / name).write_text("{}")
    save_quantized(resolve_model(directory), tmp_path / "out", "q8")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {*taken, "config.json", "model.safetensors"}


def test_from_a_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    # no tokenizer.ggml.model: a model without a tokenizer is quantised all the same
    for case in ("llama-gqa3", "qwen2", "qwen3-moe"):
        source = resolve_model(make_gguf(case, tmp_path / f"{case}.gguf"))
        for quant in ("bf16", "q4"):
            out = tmp_path / f"{case}-{quant}"
            save_quantized(source, out, quant)
            want = load_weights(source, quant)
            got = load_weights(resolve_model(out), quant)
            assert got.config == want.config
            assert differences(want, got) == []


# ----- refusals ----------------------------------------------------------------------------------


def test_another_kind_than_the_stored_one_is_refused(tmp_path: Path) -> None:
    save_quantized(resolve_model(DATA / "qwen2"), tmp_path / "out", "q8")
    source = resolve_model(tmp_path / "out")
    for quant in ("q4", "bf16"):
        with pytest.raises(ModelError, match=f"q8.*{quant}"):
            load_weights(source, quant)
    with pytest.raises(ModelError, match="original"):
        save_quantized(source, tmp_path / "again", "q4")
    with pytest.raises(UsageError, match="bf16, q8, q4"):
        load_weights(source, "q5")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_what_is_there_already(tmp_path: Path) -> None:
    source = resolve_model(copy_model("qwen2", tmp_path / "m"))
    out = tmp_path / "out"
    out.mkdir()
    save_quantized(source, out, "q8")  # an empty directory is as good as none
    before = contents(tmp_path)
    with pytest.raises(ModelError, match="--force"):
        save_quantized(source, out, "q4")
    assert contents(tmp_path) == before
    save_quantized(source, out, "q4", force=True)
    assert load_weights(resolve_model(out)).quant == "q4"
    (out / "diary.txt").write_text("dear")
    before = contents(tmp_path)
    with pytest.raises(ModelError, match=r"diary\.txt"):
        save_quantized(source, out, "q8", force=True)
    for place in (tmp_path / "m", tmp_path):  # the original itself, or around it
        with pytest.raises(ModelError, match="original"):
            save_quantized(source, place, "q8", force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(KestrelError, match="file"):
        save_quantized(source, tmp_path / "file", "q8", force=True)
    (tmp_path / "file").unlink()
    assert contents(tmp_path) == before


def test_a_failed_replacement_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = resolve_model(DATA / "qwen2")
    save_quantized(source, tmp_path / "out", "q8")
    before = contents(tmp_path)

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(quantized, "_rows_to_write", full)
    with pytest.raises(KestrelError, match="no space left"):
        save_quantized(source, tmp_path / "out", "q4", force=True)
    assert contents(tmp_path) == before


def test_interrupting_leaves_nothing(tmp_path: Path) -> None:
    def stop(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_quantized(resolve_model(DATA / "qwen2"), tmp_path / "a" / "b", "q8", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(quantized.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(KestrelError, match=r"0\.000 GB free"):
        save_quantized(resolve_model(DATA / "qwen2"), tmp_path / "out", "q8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of the file size")
def test_a_file_that_cannot_grow_is_one_clear_line(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from pykestrel.errors import KestrelError\n"
        "from pykestrel.loading import resolve_model, save_quantized\n"
        f"source = resolve_model({str(DATA / 'qwen3-moe')!r})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try:\n"
        f"    save_quantized(source, {str(tmp_path / 'out')!r}, 'q8')\n"
        "except KestrelError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "file too large" in done.stdout
    assert done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ----- damage ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["q8", "q4"])
def saved(request: pytest.FixtureRequest) -> Iterator[tuple[Path, bytes, str]]:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        save_quantized(resolve_model(DATA / "qwen2"), out, request.param)
        yield out, (out / "model.safetensors").read_bytes(), request.param


@given(data=st.data())
def test_damage_is_refused_or_stays_where_it_is(
    saved: tuple[Path, bytes, str], data: st.DataObject
) -> None:
    out, raw, _ = saved
    path = out / "model.safetensors"
    path.write_bytes(raw)
    want = load_weights(resolve_model(out))
    start = 8 + int.from_bytes(raw[:8], "little")
    in_header = data.draw(st.booleans())
    at = data.draw(st.integers(0, start - 1) if in_header else st.integers(start, len(raw) - 1))
    damaged = raw[:at] + data.draw(st.binary(min_size=1, max_size=1)) + raw[at + 1 :]
    path.write_bytes(damaged)
    try:
        got = load_weights(resolve_model(out))
    except KestrelError:
        return
    assert len(differences(want, got)) <= (0 if in_header else 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("version", 2), ("version", True), ("group_size", 64), ("kind", "q2"), ("kind", None)],
)
def test_other_versions_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    save_quantized(resolve_model(DATA / "qwen2"), tmp_path / "out", "q8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    edit_config(tmp_path / "out", quantization_config={**config["quantization_config"], key: value})
    with pytest.raises(ModelError, match=key):
        load_weights(resolve_model(tmp_path / "out"))


def test_values_that_no_quantiser_writes(tmp_path: Path) -> None:
    directory = copy_model("qwen2", tmp_path / "m")
    source = resolve_model(directory)
    for quant, name, value, word in (
        ("q8", "model.norm.weight", b"\0\0\xc0\x7f", "NaN"),
        ("q8", "model.embed_tokens.weight.scales", b"\0\x7c", "not finite"),
        ("q8", "model.embed_tokens.weight.codes", b"\x80", "-128"),
    ):
        out = tmp_path / f"{quant}-{word}"
        save_quantized(source, out, quant)
        tensors = read_safetensors(out / "model.safetensors")
        dtype, shape, raw = tensors[name]
        tensors[name] = (dtype, shape, value + raw[len(value) :])
        write_safetensors(out / "model.safetensors", tensors)
        with pytest.raises(ModelError, match=word):
            load_weights(resolve_model(out))


@pytest.mark.parametrize("quant", ["q8", "q4"])
def test_padding_must_be_zero(quant: str, tmp_path: Path) -> None:
    # a width that is no multiple of 32: the last group of down_proj is padded
    directory = copy_model("qwen2", tmp_path / "m")
    tensors = read_safetensors(directory / "model.safetensors")
    for name, (dtype, _shape, raw) in tensors.items():
        if ".mlp." in name:
            n, k = (64, 80) if "down" in name else (80, 64)
            tensors[name] = (dtype, (n, k), raw[: n * k * 2])
    write_safetensors(directory / "model.safetensors", tensors)
    edit_config(directory, intermediate_size=80)
    source = resolve_model(directory)
    save_quantized(source, tmp_path / "out", quant)
    assert (
        differences(load_weights(source, quant), load_weights(resolve_model(tmp_path / "out")))
        == []
    )
    saved = read_safetensors(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight.codes"
    dtype, shape, raw = saved[name]
    last = bytearray(raw)
    last[-1] ^= 0x11
    saved[name] = (dtype, shape, bytes(last))
    write_safetensors(tmp_path / "out" / "model.safetensors", saved)
    with pytest.raises(ModelError, match="padding"):
        load_weights(resolve_model(tmp_path / "out"))
