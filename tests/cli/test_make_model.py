"""tools/make_model.py: directories of random weights that load as real ones do, and
tools/load_times.py, which measures that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pykestrel
from pykestrel import shapes
from pykestrel.loading import resolve_model
from pykestrel.loading.load import load_weights, read_tensors
from pykestrel.quant import QTensor, dequantize

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("bf16", "q8", "q4")
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def tool(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def tiny(folder: Path, name: str = "qwen3-30b-a3b", **changes: Any) -> Path:
    """A config.json of a named shape with everything small."""
    small = TINY if name != "qwen3-30b-a3b" else {**TINY, **EXPERTS}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**shapes.config_json(name), **small, **changes}))
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_models_load_and_give_finite_logits(name: str, kind: str, tmp_path: Path) -> None:
    done = tool("make_model.py", tiny(tmp_path, name), tmp_path / "m", "--kind", kind)
    assert done.returncode == 0, done.stderr
    assert f" as {kind} in " in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}.json", "m"}
    with pykestrel.load(tmp_path / "m", device="cpu", ctx_size=64) as model:
        assert model.quant == (kind if kind != "bf16" else "q8")
        logits = model.logits(np.arange(20))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10  # neither vanishes nor grows with the depth


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_normal_and_norms_are_one(kind: str, tmp_path: Path) -> None:
    path = tiny(tmp_path, "qwen3-0.6b", hidden_size=1024)
    assert tool("make_model.py", path, tmp_path / "m", "--kind", kind).returncode == 0
    weights = load_weights(resolve_model(tmp_path / "m"), "bf16" if kind == "bf16" else None)
    for layer in weights.layers:
        assert (layer.input_norm == 1).all()
        q = layer.q
        if isinstance(q, QTensor):
            assert (q.scales < 0).any() == (kind == "q4")
            values = dequantize(q)
        else:
            values = (q.astype(np.uint32) << 16).view(np.float32)
        assert abs(values.mean()) < 0.01
        assert values.std() == pytest.approx(1 / 32, rel=0.1)  # 1 / sqrt(1024)
        assert len(np.unique(values, axis=0)) == len(values)


def test_bf16_files_are_as_hugging_face_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model = _module(monkeypatch)
    monkeypatch.setattr(make_model, "HF_SHARD_BYTES", 100_000)
    config = json.loads(tiny(tmp_path).read_text())
    size = make_model.make_model(config, "a test", tmp_path / "m", "bf16")
    source = resolve_model(tmp_path / "m")
    table = read_tensors(source)
    assert len(table) == 3 + 2 * (9 + 3 * 4)
    assert {info.dtype for info in table.values()} == {"BF16"}
    assert table["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (64, 32)
    assert sum(info.nbytes for info in table.values()) == size
    shards = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 2
    load_weights(source)


def test_a_full_model_has_the_tensors_of_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model = _module(monkeypatch)
    made = list(make_model.tensors(shapes.shape("qwen3-30b-a3b"), "bf16"))
    assert len(made) == 18_867
    assert sum(make_model.entry_bytes(t.entry) for t in made) == 2 * 30_532_122_624


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    odd = tiny(tmp_path, "qwen3-0.6b", hidden_size=40)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for words, args in (
        ("is there already", (odd, tmp_path / "there")),
        ("there is no shape 'qwen9'", ("qwen9", tmp_path / "m")),
        ("multiples of 32", (odd, tmp_path / "m", "--kind", "q4")),
        ("is not valid JSON", (broken, tmp_path / "m")),
    ):
        done = tool("make_model.py", *args)
        assert done.returncode in (1, 2)
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "m").exists()


def test_a_disk_without_room_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model = _module(monkeypatch)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    config = json.loads(tiny(tmp_path).read_text())
    with pytest.raises(pykestrel.KestrelError, match="its disk has"):
        make_model.make_model(config, "a test", tmp_path / "m", "q8")
    assert not (tmp_path / "m").exists()


def test_a_tokenizer_comes_along(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"):
        (original / name).write_text("{}")
    path = tiny(tmp_path, "qwen3-0.6b")
    done = tool("make_model.py", path, tmp_path / "m", "--tokenizer", original)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    assert resolve_model(tmp_path / "m").read_json("config.json")
    load_weights(resolve_model(tmp_path / "m"))


def test_nothing_is_left_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model = _module(monkeypatch)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make_model, "write", full)
    config = json.loads(tiny(tmp_path).read_text())
    with pytest.raises(pykestrel.KestrelError, match="no space left"):
        make_model.make_model(config, "a test", tmp_path / "m", "bf16")
    assert [p.name for p in tmp_path.iterdir()] == ["qwen3-30b-a3b.json"]


def test_load_times(tmp_path: Path) -> None:
    path = tiny(tmp_path, "qwen3-0.6b", vocab_size=151_936)  # the tokenizer is that of Qwen3
    folder = tmp_path / "models"
    folder.mkdir()
    args = ["--device", "cpu", "--folder", folder, "--runs", "1"]
    cases = ["--case", f"{path}:q4:q4:60", "--case", f"{path}:bf16:q8:0.001", "--case", "x:q4:q4:1"]
    done = tool("load_times.py", *args, *cases)
    assert done.returncode == 1  # one of them failed
    report = json.loads(done.stdout)
    assert 0 < report["bare"]["python_s"] < report["bare"]["until_imports_s"]
    assert report["bare"]["tokenizer_s"] > 0
    fast, slow, bad = report["cases"]
    assert (fast["within_limit"], slow["within_limit"]) == (True, False)
    for case in (fast, slow):
        (seen,) = case["runs"]
        assert 0 <= seen["weights_s"] <= seen["loaded_s"] < seen["first_token_s"] <= seen["exit_s"]
        assert seen["token"]
        assert case["seconds"] == seen["first_token_s"]
    assert "there is no shape 'x'" in bad["error"]
    assert not list(folder.iterdir())


def _module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import make_model

    return make_model
