"""Bad models: each gives one clear line that names the thing and says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_files import (
    CASES,
    copy_model,
    edit_config,
    edit_tensors,
    make_gguf,
    read_safetensors,
    shard_model,
)

from pykestrel import pull
from pykestrel.errors import KestrelError
from pykestrel.loading import describe, load_weights, quantized, resolve_model, save_quantized

LFS_POINTER = (
    b"version https://git-lfs.example/spec/v1\n"
    b"oid sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\nsize 379136\n"
)


def refusal(call: Callable[[], object], *words: str) -> str:
    """The one line of the KestrelError that ``call`` raises; it must contain ``words``."""
    with pytest.raises(KestrelError) as caught:
        call()
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert "\n" not in message
    assert message.isprintable()
    for word in words:
        assert word in message, message
    return message


def loading(path: Path, *words: str) -> str:
    """Loading refuses, and `describe` refuses in the same words where it reads no weights."""
    return refusal(lambda: load_weights(resolve_model(path), "bf16"), *words)


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copy_model(request.param, tmp_path / "m")


def test_a_missing_shard(model: Path) -> None:
    shards = shard_model(model)
    shards[1].unlink()
    loading(model, shards[1].name, "missing", "download")
    shards[2].unlink()
    loading(model, shards[1].name, "1 more")


def test_a_truncated_file(model: Path) -> None:
    path = model / "model.safetensors"
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    for size in (len(raw) - 1, len(raw) // 2, header + 1, header, 9):
        path.write_bytes(raw[:size])
        loading(model, str(path), "truncated", "download it again")
    path.write_bytes(raw[:5])
    loading(model, str(path), "5 bytes")
    path.write_bytes(b"")
    loading(model, str(path), "empty")
    path.write_bytes(raw + b"x")
    loading(model, str(path), "damaged")


def test_a_truncated_shard(model: Path) -> None:
    shard = shard_model(model)[2]
    shard.write_bytes(shard.read_bytes()[:-10])
    loading(model, str(shard), "truncated")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_lfs_pointer(model: Path, name: str) -> None:
    (model / name).write_bytes(LFS_POINTER)
    loading(model, str(model / name), "Git LFS pointer", "git lfs pull")


def test_an_lfs_pointer_as_a_shard_and_as_a_gguf(tmp_path: Path) -> None:
    model = copy_model("qwen2", tmp_path / "m")
    shard = shard_model(model)[0]
    shard.write_bytes(LFS_POINTER)
    loading(model, str(shard), "Git LFS pointer")
    path = tmp_path / "m.gguf"
    path.write_bytes(LFS_POINTER)
    loading(path, str(path), "Git LFS pointer")


def test_a_wrong_shape(model: Path) -> None:
    tensors = read_safetensors(model / "model.safetensors")
    name = next(n for n in tensors if n.endswith("layers.1.self_attn.o_proj.weight"))
    dtype, shape, raw = tensors[name]
    half = ("BF16", (shape[0] // 2, shape[1]), raw[: len(raw) // 2])
    edit_tensors(model, **{name.replace(".", "__"): half})
    assert dtype == "BF16"
    loading(model, name, str(list(half[1])), str(list(shape)))


def test_an_unknown_model_type(model: Path) -> None:
    edit_config(model, model_type="mamba")
    loading(model, "'mamba'", "llama, qwen2, qwen3, qwen3_moe, qwen3_vl, qwen3_vl_moe")
    edit_config(model, model_type=...)
    loading(model, "model_type is missing")


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes"])
def test_an_unsupported_quantization_config(model: Path, method: str) -> None:
    edit_config(model, quantization_config={"quant_method": method, "bits": 4})
    loading(model, "config.json", f"'{method}'", "original")


@pytest.mark.parametrize("bits", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"])
def test_weights_that_are_not_finite(model: Path, bits: bytes) -> None:
    tensors = read_safetensors(model / "model.safetensors")
    for part in ("embed_tokens", "layers.2.input_layernorm", "layers.0.self_attn.v_proj.weight"):
        copy = dict(tensors)
        name = next(n for n in copy if part in n)
        dtype, shape, raw = copy[name]
        edit_tensors(model, **{name.replace(".", "__"): (dtype, shape, raw[:-2] + bits)})
        loading(model, name, "NaN or infinite", "model.safetensors")
        edit_tensors(model, **{name.replace(".", "__"): tensors[name]})


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    loading(tmp_path / "empty", "config.json")
    loading(tmp_path / "nothing", "nothing", "pykestrel pull")
    model = copy_model("qwen2", tmp_path / "m")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    loading(model, "pickle", "safetensors")
    (model / "pytorch_model.bin").unlink()
    loading(model, "no model.safetensors")
    (model / "adapter_config.json").write_text("{}")
    loading(model, "LoRA")


def test_two_models_in_one_directory(tmp_path: Path) -> None:
    model = copy_model("qwen2", tmp_path / "m")
    shard_model(model)
    copy_model("qwen2", model)
    loading(model, "both", "remove one")
    (model / "model.safetensors.index.json").unlink()
    (model / "model.safetensors").unlink()
    loading(model, "3 .safetensors files", "index")


def test_weights_of_another_model(tmp_path: Path) -> None:
    for config, weights in (
        ("qwen2", "qwen3-tied"),
        ("qwen3-tied", "qwen2"),
        ("llama-gqa3", "qwen2"),
    ):
        model = copy_model(config, tmp_path / f"{config}-{weights}")
        copy_model(weights, tmp_path / "w")
        (tmp_path / "w" / "model.safetensors").replace(model / "model.safetensors")
        loading(model, str(model))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    model = copy_model("qwen2", tmp_path / "m")
    for name in ("model.safetensors", "config.json"):
        (model / name).unlink()
        os.mkfifo(model / name)
        loading(model, name, "not a regular file")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy_model("qwen2", tmp_path / "m")
    real = os.open

    # root may read everything, so the refusal is played
    def denied(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(path).endswith("model.safetensors"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", denied)
    loading(model, "model.safetensors", "permission denied")


def test_describe_refuses_what_loading_refuses(tmp_path: Path) -> None:
    model = copy_model("qwen2", tmp_path / "m")
    edit_tensors(model, model__norm__weight=None)
    first = loading(model, "model.norm.weight")
    assert first == refusal(lambda: describe(resolve_model(model)))


# ----- writing -----------------------------------------------------------------------------------


def test_a_full_disk_while_quantising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model(copy_model("qwen3-moe", tmp_path / "m"))
    before = sorted(p.name for p in tmp_path.iterdir())
    real = quantized._rows_to_write
    written = 0

    # the disk is full after the first tensors
    def rows(*args: Any) -> Any:
        nonlocal written
        for row in real(*args):
            written += 1
            if written > 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield row

    monkeypatch.setattr(quantized, "_rows_to_write", rows)
    out = tmp_path / "out"
    refusal(lambda: save_quantized(source, out, "q8"), str(out), "no space left", "MB free")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_real_full_disk_while_quantising(tmp_path: Path) -> None:
    """On a file system of 200 KB, where root may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.name != "posix" or os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("needs the right to mount a small file system")
    command = [mount, "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        source = resolve_model(copy_model("qwen3-moe", tmp_path / "m"))
        refusal(lambda: save_quantized(source, place / "out", "q8"), "free", "make room")
        assert list(place.iterdir()) == []
        # the room is checked first; now without that check
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantized, "check_room", lambda *args: None)
            refusal(lambda: save_quantized(source, place / "out", "q8"), "no space left")
        assert list(place.iterdir()) == []
    finally:
        subprocess.run([umount, str(place)], check=True)


def test_an_unwritable_place_for_the_result(tmp_path: Path) -> None:
    source = resolve_model(copy_model("qwen2", tmp_path / "m"))
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    refusal(lambda: save_quantized(source, out, "q8"), str(out))
    refusal(lambda: save_quantized(source, Path("/proc/none/out"), "q8"), "/proc/none")


def test_an_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYKESTREL_CACHE", str(tmp_path / "file"))
    refusal(lambda: pull.pull(pull.DEMO), str(tmp_path / "file"), "PYKESTREL_CACHE")


def test_a_damaged_tokenizer_is_not_copied(tmp_path: Path) -> None:
    model = copy_model("qwen2", tmp_path / "m")
    (model / "tokenizer.json").write_bytes(LFS_POINTER)
    out = tmp_path / "out"
    refusal(lambda: save_quantized(resolve_model(model), out, "q8"), "tokenizer.json", "LFS")
    assert not out.exists()


def test_bad_ggufs(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = make_gguf("qwen2", tmp_path / "m.gguf")
    raw = path.read_bytes()
    for size in (len(raw) - 1, len(raw) // 2, 600, 24, 3, 0):
        path.write_bytes(raw[:size])
        loading(path, str(path))
    make_gguf("qwen2", path, metadata={"general.architecture": "rwkv7"})
    loading(path, "'rwkv7'", "qwen3moe")


def test_config_json_that_is_none(tmp_path: Path) -> None:
    model = copy_model("qwen2", tmp_path / "m")
    config = model / "config.json"
    whole = config.read_text()
    for text in ("", "{", "[]", "null", '{"a": NaN}', whole[:-3], json.dumps(whole)):
        config.write_text(text)
        loading(model, str(config))
