"""`bench --synthetic`: the shapes, what is said without a GPU, and the table of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cpu_models import make_config, moe_config

from pykestrel import shapes
from pykestrel.cli import bench
from pykestrel.engine.cpu import memory_needed
from pykestrel.errors import UsageError
from pykestrel.quant import quantized_bytes
from pykestrel.weights import Traffic

from .conftest import Cli

# What the models' own pages say, and the layers and K/V heads of their config.json.
KNOWN = {
    "qwen3-0.6b": (0.6e9, 28, 8),
    "qwen3-1.7b": (1.7e9, 28, 8),
    "qwen3-4b": (4.0e9, 36, 8),
    "qwen3-8b": (8.2e9, 36, 8),
    "qwen3-14b": (14.8e9, 40, 8),
    "qwen3-32b": (32.8e9, 64, 8),
    "qwen3-30b-a3b": (30.5e9, 48, 4),
    "qwen3-235b-a22b": (235e9, 94, 4),
}


def test_the_shapes_have_the_parameters_that_their_names_say() -> None:
    assert set(shapes.NAMES) == set(KNOWN)
    for name, (parameters, layers, kv_heads) in KNOWN.items():
        config = shapes.shape(name)
        assert shapes.parameters(config) == pytest.approx(parameters, rel=0.02), name
        assert (config.num_hidden_layers, config.num_key_value_heads) == (layers, kv_heads)
        assert (config.head_dim, config.vocab_size) == (128, 151936)
        assert config.tie_word_embeddings == (parameters < 5e9)
        assert (config.num_experts > 0) == ("-a" in name)
    moe = shapes.shape("qwen3-30b-a3b")
    assert (moe.num_experts, moe.num_experts_per_tok, moe.norm_topk_prob) == (128, 8, True)
    assert all(moe.layer_is_moe)
    with pytest.raises(UsageError, match=r"no shape 'qwen3-9b'; there are qwen3-0\.6b, "):
        shapes.shape("qwen3-9b")


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_the_bytes_of_a_token(quant: str) -> None:
    dense = shapes.shape("qwen3-8b")
    traffic = Traffic.of(dense, quant)
    # a token reads one row of the embedding, not the table
    assert traffic.weights - traffic.token == quantized_bytes((151936, 4096), quant)
    bits = {"bf16": 16, "q8": 8.5, "q4": 4.5}[quant]
    assert traffic.weights == pytest.approx(shapes.parameters(dense) * bits / 8, rel=1e-3)
    moe = Traffic.of(shapes.shape("qwen3-30b-a3b"), quant)
    config = shapes.shape("qwen3-30b-a3b")
    routers = 48 * 128 * 2048
    rest = shapes.parameters(config) - routers
    assert moe.weights == pytest.approx(rest * bits / 8 + routers * 4, rel=1e-4)
    head = quantized_bytes((151936, 2048), quant)
    experts = quantized_bytes((3 * 768, 2048), quant) * 48
    assert moe.token == moe.weights - head - (128 - 8) * experts
    assert 0.08 < moe.token / moe.weights < 0.12  # 3 of 30 billion
    if quant == "bf16":
        needed = memory_needed(dense, quant, 1, "int8")["weights"]
        assert traffic.weights == pytest.approx(needed, rel=1e-3)


def test_without_a_gpu(cli: Cli, tiny: Path) -> None:
    done = cli("bench", "--synthetic", "qwen3-0.6b", "-p", "0", "-n", "1")
    assert done.returncode == 3
    assert "--synthetic measures a GPU, and none can be used: " in done.stderr
    for args, words in (
        (["--synthetic", "gpt-9"], "there is no shape 'gpt-9'; there are qwen3-0.6b"),
        (["--synthetic", "qwen3-0.6b", "-m", tiny], "--synthetic needs no model"),
        (["--synthetic", "qwen3-0.6b", "--cpu"], "a GPU alone: it excludes --cpu"),
        (["--synthetic", "qwen3-0.6b", "--verify"], "a GPU alone: it excludes --verify"),
        (["--synthetic", "qwen3-0.6b", "--prefill", "cpu"], "it excludes --prefill"),
        (["--synthetic", "qwen3-0.6b", "-d", "50000"], "qwen3-0.6b was made for 40960"),
        (["--synthetic", "qwen3-8b", "-p", "9000000000"], "was made for 131072"),
    ):
        done = cli("bench", *args)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def row(kind: str, **more: Any) -> dict[str, Any]:
    counts = {"launches": 1.0, "h2d_copies": 1.0, "d2h_copies": 1.0}
    return {
        "test": f"{kind}128 @ d32768",
        "tokens_per_second": 1234.5678,
        "spread": 12.3,
        "ms_per_token": 0.81,
        "per_token": counts,
        "logits_hash": "0123456789abcdef",
        **more,
    }


def test_the_table_of_a_gpu() -> None:
    known = {
        "model": "some/where/Qwen3-235B-A22B-Instruct-2507",
        "backend": "cuda",
        "synthetic": True,
        "parameters": 235_093_634_560,
        "weight_bytes": 132_000_000_000,
        "quant": "q4",
        "kv": "int8",
        "ctx_size": 33000,
        "gpu": {
            "name": "NVIDIA H200",
            "driver": "580.65.06",
            "driver_cuda": "13.0",
            "sm_clock_mhz": 1980,
            "read_bytes_per_second": 4.4e12,
            "peak_matrix_flops": 1.0705e15,
        },
    }
    rows = [
        row("pp", tflop_per_second=512.3, percent_of_matrix_peak=47.86),
        row("tg", gb_per_second=3210.9, percent_of_bandwidth=72.97),
    ]
    text = bench.render(known, rows)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "ms/token" in lines[0]
    assert "of peak" in lines[0]
    assert "| Qwen3-235B-A22… |" in text
    assert "| 3211 |         |  73.0 % |" in text
    assert "|      |     512 |  47.9 % |" in text
    assert (
        "235,093.6 M parameters, random weights, 132 GB of weights, K/V int8, context 33000" in text
    )
    assert "NVIDIA H200, driver 580.65.06, CUDA 13.0, SM clock 1980 MHz; reads 4,400 GB/s" in text
    assert "1,070 TFLOP/s of dense bf16 at that clock" in text
    assert (
        "tg128 @ d32768: a token is 1.00 launches, 1.00 copies there, 1.00 back; logits 01" in text
    )
    known["gpu"] |= {"driver": None, "read_bytes_per_second": None, "peak_matrix_flops": None}
    text = bench.render(known, [row("tg", gb_per_second=3210.9)])
    assert "driver unknown" in text
    assert "read rate unknown" in text


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize(("n", "depth"), [(1, 0), (7, 0), (7, 3), (20, 30), (64, 0)])
def test_the_operations_of_a_prompt(n: int, depth: int, window: int | None) -> None:
    """Counted one token, and one visible position, at a time."""
    from pykestrel.cli.measure import prompt_flops

    config = moe_config(layer_is_moe=(True, False), layer_window=(None, window))
    c, h = config, config.hidden_size
    wanted = 2 * h * c.vocab_size
    for position in range(depth, depth + n):
        for moe, most in zip(c.layer_is_moe, c.layer_window, strict=True):
            wanted += 2 * (2 * h * c.q_dim + 2 * h * c.kv_dim)
            f = c.num_experts_per_tok * c.moe_intermediate_size if moe else c.intermediate_size
            wanted += 2 * 3 * h * f + (2 * c.num_experts * h if moe else 0)
            seen = min(position + 1, most or position + 1)
            wanted += 2 * 2 * c.q_dim * seen  # scores, and the weighted sum of values
    assert prompt_flops(config, n, depth) == wanted


def test_the_matrix_peak_of_a_gpu() -> None:
    from types import SimpleNamespace

    from pykestrel.cli.measure import matrix_peak_of

    h100 = SimpleNamespace(cc_major=9, cc_minor=0, sm_count=132, sm_clock_khz=1_830_000)
    assert matrix_peak_of(h100) == pytest.approx(989.4e12, rel=1e-3)  # type: ignore[arg-type]
    h100.cc_major = 7  # and GeForce boards do half of what others do
    assert matrix_peak_of(h100) is None  # type: ignore[arg-type]


def test_the_k_v_that_a_token_reads() -> None:
    from pykestrel.cli.measure import Subject

    config = make_config(layer_window=(5, None), num_key_value_heads=2, head_dim=16)
    subject = Subject.__new__(Subject)
    vars(subject).update(config=config, kv="int8")
    row = 2 * 2 * (16 + 4)  # k and v of two heads, and their scales
    assert subject.kv_bytes(4) == 2 * 4 * row
    assert subject.kv_bytes(100.5) == (5 + 100.5) * row
