"""Say what a model holds and what it would need, without loading it."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..units import show_bytes
from .flags import COMMON, CTX_SIZE, JSON, KV, MODEL
from .models import model_name
from .options import Option, add_groups
from .terminal import Terminal, table

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..device import Running
    from ..loading import ModelInfo


def configure(parser: ArgumentParser) -> list[Option]:
    parser.add_argument("source", nargs="?", metavar="MODEL", help="what --model takes")
    return add_groups(parser, {"model": (MODEL, CTX_SIZE, KV), "output": (JSON, *COMMON)})


def run(args: Namespace, terminal: Terminal) -> int:
    if args.source is not None:
        if "model" in args.given:
            raise UsageError("the model was given twice: with --model and without a flag")
        args.model = args.source
    from .. import machine
    from ..arguments import check_ctx
    from ..device import choose_device, fit
    from ..engine.cpu import memory_needed
    from ..loading import describe, resolve_model
    from ..prediction import predict

    info = describe(resolve_model(model_name(args, terminal, demo="pulled")))
    ctx = check_ctx(args.ctx_size, info.config)
    kv = args.kv or "int8"
    kinds = [info.stored_quant] if info.stored_quant else ["bf16", "q8", "q4"]
    needs = [{"quant": kind, **memory_needed(info.config, kind, ctx, kv)} for kind in kinds]
    free = machine.memory()["available"]
    stored = info.stored_quant
    running = fit(
        choose_device("auto"), "auto", info.config, stored or "q8", ctx, kv,
        fixed_quant=stored is not None,
    )  # fmt: skip
    on_gpu = _gpu_needs(running, info.config, kinds, ctx, kv)
    fate = predict(info.config, stored or "q8", ctx, kv, fixed_quant=stored is not None)
    if args.json:
        result = facts(info)
        result |= {"ctx_size": ctx, "kv": kv, "needs": needs, "memory_available": free}
        result |= {"gpu_needs": on_gpu, "prediction": fate.facts()}
        result |= {"engine": running.name, "engine_reason": running.why}
        terminal.json(result)
        return 0
    lines = describe_lines(info)
    lines.append(("context", f"{ctx} of {info.config.max_position_embeddings} positions, K/V {kv}"))
    lines.append(("runs on", str(running)))
    lines.append(("fits", fate.line()))
    width = max(len(name) for name, _ in lines) + 2
    for name, value in lines:
        terminal.line(f"{name.ljust(width)}{value}")
    terminal.line("\n" + _needs_table(needs, free))
    if on_gpu:
        kinds_there = ", ".join(f"{show_bytes(size)} as {kind}" for kind, size in on_gpu.items())
        terminal.line(f"\nOn {running.why} it needs {kinds_there}, and nothing of the above.")
    return 0


def _gpu_needs(
    running: Running, config: ModelConfig, kinds: list[str], ctx_size: int, kv: str
) -> dict[str, int] | None:
    """Bytes of device memory by kind of weights; None where no GPU runs the model."""
    if running.name != "cuda":
        return None
    from ..engine.cuda import device_need

    return {kind: device_need(config, kind, ctx_size, kv).total for kind in kinds}


def facts(info: ModelInfo) -> dict[str, Any]:
    """`ModelInfo` as JSON data, with the model_type at the top."""
    result = dataclasses.asdict(info)
    result["path"] = str(info.path)
    result["dtypes"] = {k: {"tensors": n, "bytes": b} for k, (n, b) in info.dtypes.items()}
    return {"model_type": info.config.model_type, **result}


def describe_lines(info: ModelInfo) -> list[tuple[str, str]]:
    """(what, value) of the table's head."""
    c = info.config
    experts = ""
    if c.num_experts:
        moe = sum(c.layer_is_moe)
        experts = f", {c.num_experts} experts ({c.num_experts_per_tok} a token) in {moe} of them"
    dtypes = ", ".join(f"{n} {name}" for name, (n, _) in info.dtypes.items())
    form = "GGUF" if info.kind == "gguf" else "safetensors"
    shape = (
        f"hidden {c.hidden_size}, MLP {c.moe_intermediate_size or c.intermediate_size}, "
        f"heads {c.num_attention_heads}, K/V heads {c.num_key_value_heads} of {c.head_dim}, "
        f"vocabulary {c.vocab_size}"
    )
    lines = [
        ("model", f"{info.name} ({c.model_type}, {form})"),
        *([] if str(info.path) == info.name else [("path", str(info.path))]),
        ("layers", f"{c.num_hidden_layers}{experts}"),
        ("shape", shape),
        ("RoPE", f"{c.rope.rope_type}, theta {c.rope.rope_theta:g}"),
        ("parameters", f"{info.parameters:,}"),
        ("tensors", f"{info.tensors} ({dtypes}), {show_bytes(info.file_bytes)} on disk"),
    ]
    return lines + [("note", note) for note in info.notes]


def _needs_table(needs: list[dict[str, Any]], free: int | None) -> str:
    head = ["weights as", "weights", "K/V", "memory needed", "fits", "float32 copies"]
    rows = [head]
    for need in needs:
        fits = "?" if free is None else "yes" if need["total"] <= free else "no"
        cells = [show_bytes(need[key]) for key in ("weights", "kv", "total")]
        rows.append([need["quant"], *cells, fits, show_bytes(need["expanded"])])
    note = (
        "float32 copies of the weights, beyond the memory needed, make the CPU engine fast:\n"
        "it keeps as many as --cpu-cache allows, else all of them if half of the free memory holds "
        "them."
    )
    free_words = "" if free is None else f"{show_bytes(free)} of memory are free.\n"
    return f"{table(rows, right=(1, 2, 3, 5))}\n\n{free_words}{note}"
