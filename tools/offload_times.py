#!/usr/bin/env python3
"""Measure what of a model is worth a round trip to the GPU, and what a part of it there gives.

    python3 tools/offload_times.py MODEL [--quant q8] [--kv f16] [--tokens 64] [--repeats 3]

Tables as one JSON. "squares": matrices of a few sizes, from where the CPU wins to where the GPU
does. "fused": products that share their rows, together and one by one. "products": each kind of
matrix with 1 and 32 rows, on the CPU (from the codes, and from its float32 copy) and on the GPU,
copies and synchronisation included, and what the measured gate makes of it. "budgets": the model
with that share of its weights on the GPU, as segments of whole layers and product by product:
decoding and prompt speed, what lies there, and how far the greedy text is that of the CPU; token by
token on that text, where the part would choose another and how near the CPU had found the two.
tools/make_model.py makes a model of any named shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pykestrel  # noqa: E402
from pykestrel import native  # noqa: E402
from pykestrel.engine.cpu.linear import Linear, Place  # noqa: E402
from pykestrel.engine.cpu.workers import Workers  # noqa: E402
from pykestrel.engine.cuda import device_need  # noqa: E402
from pykestrel.engine.offload import OffloadEngine  # noqa: E402
from pykestrel.engine.offload.engine import cpu_seconds  # noqa: E402
from pykestrel.errors import KestrelError  # noqa: E402
from pykestrel.loading import read_config, resolve_model  # noqa: E402
from pykestrel.quant import f32_to_bf16, quantize  # noqa: E402

ROWS = (1, 32)
SPARE = 1 << 16  # a layer that no model has
WIDTH = 2048  # input features
TOGETHER = {  # output features of what shares its rows
    "q, k, v": (2048, 1024, 1024),
    "gate, up": (6144, 6144),
    "gate and up of 8 experts": (1536,) * 8,
}
SQUARES = (64, 128, 256, 512, 1024, 2048, 4096)


def say(text: str) -> None:
    print(f"offload_times: {text}", file=sys.stderr, flush=True)


def products(model: pykestrel.Model) -> dict[str, Any]:
    """Each kind of matrix that lies on the device, alone."""
    engine = model.session.engine
    assert isinstance(engine, OffloadEngine)
    there = engine.residency.places()
    first: dict[str, Any] = {}
    for linear in engine.matrices():
        if linear.place in there:
            first.setdefault(linear.place.kind, linear)
    rows_of = []
    for kind, linear in first.items():
        for rows in ROWS:
            flop = 2 * rows * linear.n * linear.k
            row = {
                "kind": kind,
                "n": linear.n,
                "k": linear.k,
                "rows": rows,
                "flop": flop,
                "cpu_us": round(1e6 * cpu_seconds(linear, rows), 1),
                "cpu_float32_us": round(1e6 * cpu_seconds(linear, rows, expanded=True), 1),
                "device_us": round(1e6 * engine.device.seconds(linear, rows), 1),
                "offloaded": flop >= engine.device.min_flop,
            }
            best = min(row["cpu_us"], row["cpu_float32_us"])
            row["gain"] = round(best / row["device_us"], 2)
            say(json.dumps(row))
            rows_of.append(row)
    return {"min_flop": round(engine.device.min_flop), "rows": rows_of}


def call_us(handle: native.Handle, calls: list[native.Products], x: F32, y: F32) -> float:
    """Microseconds of these calls one after another: the median of some."""
    times = []
    for _ in range(50):
        began = time.perf_counter()
        for call in calls:
            native.dev_gemm_fused(handle, call, x, y)
        times.append(time.perf_counter() - began)
    return round(1e6 * float(np.median(times)), 1)


def squares(handle: native.Handle, quant: str) -> list[dict[str, Any]]:
    """Square matrices of random weights, one row: the CPU, from the codes, and the GPU."""
    rows_of = []
    for n in SQUARES:
        values = np.random.default_rng(n).standard_normal((n, n), np.float32)
        weight: Any = f32_to_bf16(values) if quant == "bf16" else quantize(values, quant)
        linear = Linear([weight], None, Workers(None), Place("o"))
        key, matrix = native.wkey(SPARE, native.Proj.Q), native.Matrix(quant, 1, n, n)
        native.cache_fill(handle, key, matrix, pinned=False)
        call = native.Products([native.Product(key=key, rows=1, stride=n)])
        x, y = np.ones((1, n), np.float32), np.empty((1, n), np.float32)
        row: dict[str, Any] = {"n": n, "flop": 2 * n * n}
        row["cpu_us"] = round(1e6 * cpu_seconds(linear, 1), 1)
        row["cpu_float32_us"] = round(1e6 * cpu_seconds(linear, 1, expanded=True), 1)
        row["device_us"] = call_us(handle, [call], x, y)
        say(json.dumps(row))
        rows_of.append(row)
    native.cache_drop(handle, native.wkey(SPARE, native.Proj.Q))
    return rows_of


def fused(handle: native.Handle, quant: str) -> list[dict[str, Any]]:
    """Products that share their rows, in one call and in one call each."""
    rows_of = []
    for name, widths in TOGETHER.items():
        keys = [native.wkey(SPARE, native.Proj.EXPERT_GU + i) for i in range(len(widths))]
        for key, n in zip(keys, widths, strict=True):
            native.cache_fill(handle, key, native.Matrix(quant, 1, n, WIDTH), pinned=False)
        for rows in ROWS:
            x = np.ones((rows, WIDTH), np.float32)
            y = np.empty(rows * sum(widths), np.float32)
            begins = np.cumsum([0, *widths])[:-1].tolist()
            stride = sum(widths)
            products = [
                native.Product(key=key, rows=rows, y=begin, stride=stride)
                for key, begin in zip(keys, begins, strict=True)
            ]
            row = {"members": name, "rows": rows}
            one, each = [native.Products(products)], [native.Products([p]) for p in products]
            row |= {
                "fused_us": call_us(handle, one, x, y),
                "single_us": call_us(handle, each, x, y),
            }
            say(json.dumps(row))
            rows_of.append(row)
        for key in keys:
            native.cache_drop(handle, key)
    return rows_of


def run(model: pykestrel.Model, prompt: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    """Speed of a prompt and of decoding after one run that warms up: medians, and the slowest and
    the fastest decoding."""
    settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    model.generate(prompt[:8], max_tokens=4, **settings)
    made = []
    for _ in range(repeats):
        made.append(model.generate(prompt, max_tokens=tokens, reuse=False, **settings))
    decoded = [one.timings.decode_tps for one in made]
    assert all(one.tokens == made[0].tokens for one in made)
    return {
        "prompt_tokens_per_second": round(median(one.timings.prompt_tps for one in made), 1),
        "tokens_per_second": round(median(decoded), 2),
        "slowest_and_fastest": [round(min(decoded), 2), round(max(decoded), 2)],
        "text": made[0].tokens,
    }


def along(model: pykestrel.Model, prompt: list[int], text: list[int]) -> F32:
    """The logits that chose each token of ``text``, token by token after the prompt."""
    engine = model.session.engine
    engine.truncate(0)
    return np.array([engine.forward(ids) for ids in (prompt, *([token] for token in text[:-1]))])


def compared(got: F32, want: F32) -> dict[str, Any]:
    """Of logits along the CPU's text: how many tokens would be the same, by how much logits differ
    (the median over tokens of the largest), and how near the CPU had found two of which the other
    was chosen."""
    agree = got.argmax(axis=1) == want.argmax(axis=1)
    rows = np.flatnonzero(~agree)
    nearness = want[rows].max(axis=1) - want[rows, got[rows].argmax(axis=1)]
    return {
        "agree": int(agree.sum()),
        "difference": float(np.median(np.abs(got - want).max(axis=1))),
        "nearness": [float(value) for value in nearness],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quant", default=None)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--tokens", type=int, default=64, help="to decode")
    parser.add_argument("--prompt", type=int, default=256, help="its tokens")
    parser.add_argument("--repeats", type=int, default=1, help="of each measurement of a model")
    parser.add_argument("--percents", default="0,25,50,75,99,100")
    args = parser.parse_args()
    source = resolve_model(args.model)
    config = read_config(source)
    context = min(config.max_position_embeddings, args.prompt + args.tokens + 64)
    settings: dict[str, Any] = {"quant": args.quant, "kv": args.kv, "ctx_size": context}
    report: dict[str, Any] = {"model": source.name}
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, min(config.vocab_size, 32_000), args.prompt).tolist()
    try:
        with pykestrel.load(args.model, device="cpu", **settings) as model:
            quant = model.quant
            seen = run(model, prompt, args.tokens, args.repeats)
            text = seen.pop("text")
            want = along(model, prompt, text)
        report |= {"quant": quant, "kv": args.kv, "cpu": seen}
        say(json.dumps(seen))
        whole = device_need(config, quant, context, args.kv).weights
        report["weights_bytes"] = whole
        with pykestrel.load(
            args.model, device="cuda", vram_budget=whole - 1, offload="projections", **settings
        ) as model:
            report["products"] = products(model)
            offload = model.session.engine
            assert isinstance(offload, OffloadEngine)
            assert offload.handle is not None
            report["squares"] = squares(offload.handle, quant)
            report["fused"] = fused(offload.handle, quant)
        report["budgets"] = []
        for percent in map(int, args.percents.split(",")):
            for mode in ("segments", "projections")[: 1 if percent in (0, 100) else 2]:
                budget = whole * percent // 100
                began = time.perf_counter()
                with pykestrel.load(
                    args.model, device="cuda", vram_budget=budget, offload=mode, **settings
                ) as model:
                    loaded = time.perf_counter() - began
                    seen = run(model, prompt, args.tokens, args.repeats)
                    same = next(
                        (i for i in range(args.tokens) if seen["text"][i] != text[i]), args.tokens
                    )
                    del seen["text"]
                    seen |= {"same_tokens": same, **compared(along(model, prompt, text), want)}
                    engine = model.session.engine
                    part = engine.stats() if isinstance(engine, OffloadEngine) else {}
                    row = {"percent": percent, "mode": mode, "engine": model.engine.name, **seen}
                    row |= {"load_s": round(loaded, 2)}
                    for name in ("device_weights", "segment_layers", "evictions", "min_flop"):
                        row[name] = part.get(name)
                say(json.dumps(row))
                report["budgets"].append(row)
    except KestrelError as error:
        say(f"error: {error}")
        return 1
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
