"""bench, perplexity, tokenize, quantize, info and pull on small models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import pykestrel

from .conftest import Cli


def test_bench(cli: Cli, tiny: Path) -> None:
    args = ("bench", "-m", tiny, "-p", "16,32", "-n", "8", "-d", "0,20", "-r", "2")
    done = cli(*args)
    assert (done.returncode, done.stderr) == (0, "")
    head = done.stdout.splitlines()[0]
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "K/V int8, context 52, on cpu with " in done.stdout
    for column in ("model", "size", "quant", "test", "tokens/s", "ms/token", "GB/s"):
        assert f" {column} " in head
    for test in ("pp16", "pp32", "tg8", "pp16 @ d20", "tg8 @ d20"):
        assert f"| {test} " in done.stdout
    done = cli(*args, "--json", "--quant", "q4")
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(done.stdout.splitlines()) == 1
    assert [t["test"] for t in result["tests"]] == [
        "pp16", "pp32", "tg8", "pp16 @ d20", "pp32 @ d20", "tg8 @ d20",
    ]  # fmt: skip
    assert result["quant"] == "q4"
    assert result["backend"] == "cpu"
    assert all(len(t["seconds"]) == 2 and t["tokens_per_second"] > 0 for t in result["tests"])
    assert result["blas"]


def test_bench_with_ids_and_limits(cli: Cli, tiny: Path) -> None:
    done = cli("bench", "-m", tiny, "--prompt-ids", "1,2,3", "-n", "0", "-r", "1", "--json")
    assert [t["test"] for t in json.loads(done.stdout)["tests"]] == ["pp3"]
    done = cli("bench", "-m", tiny, "-p", "600")
    assert (done.returncode, "the tests need 600 positions and" in done.stderr) == (2, True)
    assert "was made for 512: take fewer with --n-prompt" in done.stderr
    done = cli("bench", "-m", tiny, "-c", "513", "-p", "8", "-n", "0")
    assert (done.returncode, "--ctx-size must be between 2 and the 512" in done.stderr) == (2, True)
    done = cli("bench", "-m", tiny, "-c", "16")
    assert (done.returncode, "--ctx-size 16 is too small" in done.stderr) == (2, True)


def test_perplexity_is_what_logits_say(cli: Cli, tiny: Path) -> None:
    ids = [int(i) for i in np.random.default_rng(5).integers(2, 320, 40)]
    text = ",".join(map(str, ids))
    args = ("perplexity", "-m", tiny, "--prompt-ids", text, "--kv", "f32")
    done = cli(*args, "--quant", "bf16", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)["results"][0]
    with pykestrel.load(tiny, device="cpu", quant="bf16", kv="f32") as model:
        nll = reference_nll(model.logits(ids), ids)
    assert result["tokens"] == 39
    assert result["nll"] == pytest.approx(nll.mean(), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-4)
    assert result["nll_stderr"] == pytest.approx(nll.std(ddof=1) / math.sqrt(39), rel=1e-4)


def reference_nll(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """float64 [len(ids) - 1]: -log p of ids[1:], from the logits [len(ids), V] of one pass."""
    x = logits[:-1].astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    logp = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return -logp[np.arange(len(ids) - 1), ids[1:]]


def test_one_token_has_no_standard_error(cli: Cli, tiny: Path) -> None:
    args = ("perplexity", "-m", tiny, "--prompt-ids", "1,2")
    result = json.loads(cli(*args, "--json").stdout)["results"][0]
    assert (result["nll_stderr"], result["perplexity_stderr"]) == (None, None)
    assert "\u00b1 -" in cli(*args).stdout
    assert "1 token scored" in cli(*args).stdout


def test_perplexity_windows(cli: Cli, tiny: Path) -> None:
    """Every token is scored once, each from the window that the rule names."""
    ids = [int(i) for i in np.random.default_rng(6).integers(2, 320, 50)]
    text = ",".join(map(str, ids))
    args = ("--prompt-ids", text, "--kv", "f32", "--quant", "bf16", "--json")
    done = cli("perplexity", "-m", tiny, "-c", "16", "--stride", "6", *args)
    result = json.loads(done.stdout)["results"][0]
    expected: list[float] = []
    with pykestrel.load(tiny, device="cpu", quant="bf16", kv="f32") as model:
        end = 16
        expected += list(reference_nll(model.logits(ids[:16]), ids[:16]))
        while end < 50:
            start, done_before, end = min(end + 6, 50) - 16, end, min(end + 6, 50)
            window = ids[start:end]
            expected += list(reference_nll(model.logits(window), window))[-(end - done_before) :]
    assert result["tokens"] == len(expected) == 49
    assert result["nll"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_perplexity_side_by_side(cli: Cli, tiny_chat: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    args = ("perplexity", "-m", tiny_chat, text, "-c", "64", "--quant", "bf16,q8,q4")
    done = cli(*args)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:5]] == [
        "bf16", "q8", "q4",
    ]  # fmt: skip
    assert max(map(len, done.stdout.splitlines())) <= 100
    results = json.loads(cli(*args, "--json").stdout)["results"]
    assert "kl" not in results[0]
    assert 0 < results[1]["kl"] < results[2]["kl"]
    assert 100 >= results[1]["same_top_percent"] >= results[2]["same_top_percent"] > 0
    assert results[1]["delta_nll"] == pytest.approx(results[1]["nll"] - results[0]["nll"])
    from_stdin = cli("perplexity", "-m", tiny_chat, "-", "-c", "64", "--json",
                     stdin=text.read_bytes())  # fmt: skip
    assert json.loads(from_stdin.stdout)["results"][0]["nll"] == results[1]["nll"]


def test_perplexity_of_bad_texts(cli: Cli, tiny_chat: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text("a")
    for name, words in {
        "missing.txt": "cannot be read",
        ".": "cannot be read",
        "latin.txt": "not UTF-8",
    }.items():
        done = cli("perplexity", "-m", tiny_chat, name)
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr
        assert name in done.stderr
    assert "at least 2" in cli("perplexity", "-m", tiny_chat, "short.txt").stderr


def test_tokenize(cli: Cli, tiny_chat: Path) -> None:
    done = cli("tokenize", "-m", tiny_chat, "--ids", "h\u00e9<|im_end|>")
    assert done.returncode == 0
    ids = done.stdout.strip()
    assert ids.endswith(",301")
    assert cli("tokenize", "-m", tiny_chat, "--decode", ids).stdout == "h\u00e9<|im_end|>\n"
    assert (
        cli("tokenize", "-m", tiny_chat, "--ids", stdin="h\u00e9<|im_end|>").stdout.strip() == ids
    )
    lines = cli("tokenize", "-m", tiny_chat, "hi").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["'h'", "'i'"]
    assert cli("tokenize", "-m", tiny_chat, "--count", "hi").stdout == "2\n"
    as_json = json.loads(cli("tokenize", "-m", tiny_chat, "--json", "hi").stdout)
    assert as_json["pieces"] == ["h", "i"]
    as_json = json.loads(cli("tokenize", "-m", tiny_chat, "--json", "\u00e9<|im_end|>").stdout)
    assert as_json["pieces"] == ["\ufffd", "\ufffd", "<|im_end|>"]
    assert as_json["bytes"] == [[0xC3], [0xA9], None]
    decoded = cli("tokenize", "-m", tiny_chat, "--decode", ids, "--json").stdout
    assert json.loads(decoded)["text"] == "h\u00e9<|im_end|>"
    assert cli("tokenize", "-m", tiny_chat, "--decode", "9999").returncode == 2


def test_tokenize_without_a_tokenizer(cli: Cli, tiny: Path) -> None:
    done = cli("tokenize", "-m", tiny, "hi")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


@pytest.mark.parametrize("quant", ["q8", "q4", "bf16"])
def test_quantize(cli: Cli, tiny_chat: Path, tmp_path: Path, quant: str) -> None:
    out = tmp_path / quant
    done = cli("quantize", tiny_chat, out, "--quant", quant)
    assert (done.returncode, done.stdout) == (0, f"{out}\n")
    args = ("--temp", "0", "-n", "10", "hello")
    direct = cli("run", "-m", tiny_chat, "--quant", quant, *args)
    assert cli("run", "-m", out, *args).stdout == direct.stdout
    done = cli("quantize", tiny_chat, out)
    assert (done.returncode, "is there already" in done.stderr) == (1, True)
    assert cli("quantize", "-m", tiny_chat, out, "--force", "--quant", quant).returncode == 0
    if quant != "bf16":
        done = cli("run", "-m", out, "--quant", "bf16", *args)
        assert (done.returncode, quant in done.stderr) == (1, True)


def test_quantize_where_nothing_can_be_written(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in ("file", "file/below"):
        done = cli("quantize", tiny, out)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_info(cli: Cli, tiny: Path) -> None:
    done = cli("info", tiny)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("llama", "bf16", "q8", "q4", "cpu"):
        assert word in done.stdout
    result = json.loads(cli("info", tiny, "--json", "-c", "256").stdout)
    assert result["model_type"] == "llama"
    needs = {need["quant"]: need for need in result["needs"]}
    assert needs["q4"]["weights"] < needs["q8"]["weights"] < needs["bf16"]["weights"]


def test_pull_lists_and_refuses(cli: Cli, env: dict[str, str], tmp_path: Path) -> None:
    done = cli("pull")
    assert done.returncode == 0
    assert "smollm2-135m" in done.stdout
    done = cli("pull", "no-such-model")
    assert done.returncode != 0
    assert "no-such-model" in done.stderr
    assert len(done.stderr.splitlines()) == 1  # it is not said to be fetched first


def test_an_unwritable_cache(cli: Cli, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env["PYKESTREL_CACHE"] = str(tmp_path / "file" / "cache")
    done = cli("pull", "smollm2-135m")
    assert done.returncode == 1
    assert "PYKESTREL_CACHE" in done.stderr


@pytest.mark.model
def test_a_pulled_model_is_not_fetched_again(
    cli: Cli, env: dict[str, str], demo_model: Path
) -> None:
    env["PYKESTREL_CACHE"] = str(demo_model.parent.parent)
    done = cli("pull", "smollm2-135m")
    assert (done.returncode, done.stdout) == (0, f"{demo_model}\n")
    assert done.stderr == "smollm2-135m is already in the cache:\n"
    assert cli("tokenize", "--count", "hello").stdout == "1\n"  # it stands in for --model
