"""Measure prefill and decode speed.

ppN is a prompt of N tokens in one forward pass, tgN is N tokens one at a time, each the most likely
after the last, ttftN the time from a call with a prompt of N ids to its first token; a test is
timed --runs times after a warm-up. GB/s counts the bytes of weights and K/V that a token must read;
on a GPU "of peak" is its share of the read rate measured there.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import CudaUnavailable, UsageError
from ..meter import LoadMeter
from ..units import plural, show_bytes
from .flags import COMMON, JSON, LOADING, PROMPT_IDS, YES
from .models import model_name, open_model, split_line, tell_residency
from .options import Option, add_groups, count, exclude, listed
from .terminal import Terminal, table

if TYPE_CHECKING:
    from ..engines import Progress
    from ..model import Model
    from .measure import Subject

TESTS = (
    Option(
        ("-p", "--n-prompt", "--pp"), "prompt lengths, such as 512,2k,8k; 0: none", listed(count),
        "N,..", default="512",
    ),
    Option(
        ("-n", "--n-gen", "--tg", "--max-tokens", "--n-predict"),
        "lengths of generation, 0: none", listed(count), "N,..", default="128",
    ),
    Option(
        ("--ttft",), "prompt lengths of which the time to the first token is measured, 0: none",
        listed(count), "N,..", default="1k where neither --n-prompt nor --n-gen is given",
    ),
    Option(
        ("-d", "--depth"), "tokens already in the context when a test begins, such as 0,4k,16k,32k",
        listed(count), "N,..", default="0",
    ),
    Option(("-r", "--runs"), "how often each test is timed", count, "N", default="3"),
    PROMPT_IDS,
    Option(
        ("--synthetic",),
        "measure this shape with random weights on the GPU, such as qwen3-30b-a3b; needs no files",
        metavar="NAME",
    ),
)  # fmt: skip


def configure(parser: ArgumentParser) -> list[Option]:
    groups = {"tests": TESTS, "model": (*LOADING, YES), "output": (JSON, *COMMON)}
    return add_groups(parser, groups)


def run(args: Namespace, terminal: Terminal) -> int:
    from .measure import Test, facts, measure, read_bandwidth, summary

    exclude(args, "synthetic", ("model",), "--synthetic needs no model: it excludes --model")
    for other, is_cpu in (
        ("device", args.device == "cpu"),
        ("prefill", args.prefill == "cpu"),
        ("verify", args.verify),
        ("vram_budget", args.vram_budget is not None),
        ("host_budget", args.host_budget is not None),
        ("offload", args.offload is not None),
        ("min_flop", args.min_flop is not None),
    ):
        if is_cpu:
            flag = "cpu" if other == "device" else other.replace("_", "-")
            why = f"--synthetic has its weights on a GPU alone: it excludes --{flag}"
            exclude(args, "synthetic", (other,), why)
    exclude(args, "prompt_ids", ("n_prompt",), "--prompt-ids is the prompt: it excludes --n-prompt")
    prompts = [len(args.prompt_ids)] if args.prompt_ids else args.n_prompt or [512]
    gens = [128] if args.n_gen is None else args.n_gen
    tests = [
        Test(kind, n, depth)
        for depth in (args.depth or [0])
        for kind, lengths in (("pp", prompts), ("tg", gens))
        for n in lengths
        if n > 0
    ]
    tests += [Test("ttft", n, 0) for n in args.ttft or () if n > 0]
    runs = 3 if args.runs is None else args.runs
    if not tests or runs < 1:
        raise UsageError("nothing to measure: every test has 0 tokens or --runs is 0")
    longest = max(test.positions for test in tests)
    if args.ctx_size is not None and args.ctx_size < longest:
        raise UsageError(f"--ctx-size {args.ctx_size} is too small: the tests need {longest}")
    name = model_name(args, terminal, demo="offer") if args.synthetic is None else None
    if all(value is None for value in (args.ttft, args.n_prompt, args.n_gen, args.prompt_ids)):
        usual = Test("ttft", 1024, 0)
        if usual.positions <= (args.ctx_size or _limit(args, name)):
            tests.append(usual)
            longest = max(longest, usual.positions)

    ctx_size = args.ctx_size or longest
    if name is None and ctx_size > _limit(args, None):
        raise UsageError(
            f"the tests need {ctx_size} positions and {args.synthetic} was made for "
            f"{_limit(args, None)}: take fewer with --n-prompt, --n-gen, --depth or --ctx-size"
        )
    with _open(args, terminal, name, ctx_size) as subject:
        bandwidth = read_bandwidth(subject)
        known = facts(subject, bandwidth)
        matrix_peak = known.get("gpu", {}).get("peak_matrix_flops")
        if known["blas_note"] and known["backend"] != "cuda":
            terminal.warn(str(known["blas_note"]))
        ids = _ids(subject, longest, args.prompt_ids)
        results = []
        with terminal.progress("measuring", unit="runs") as report:
            total = len(tests) * (runs + 1)
            for done, test in enumerate(tests):
                tick = partial(_tick, report, test.name, done * (runs + 1), total)
                measured = measure(subject, test, ids, runs, tick)
                results.append(summary(subject, test, measured, bandwidth, matrix_peak))
        for result in results:
            if result["built_in_window"]:
                terminal.warn(_built(result, known["backend"]))
        known["engine_stats"] = _stats(subject)
    if args.json:
        terminal.json({**known, "tests": results})
    else:
        load_line = split_line(subject.load_s, subject.loaded)
        terminal.line(render({**known, "load_line": load_line}, results))
    return 0


def _built(result: dict[str, Any], backend: str) -> str:
    """A measurement that is not of the model alone."""
    remedy = "take a smaller --quant" if backend == "cuda" else "a larger --cpu-cache keeps more"
    weights = plural(result["built_in_window"], "weight")
    return f"{weights} had to be built again while {result['test']} was timed: {remedy}"


def _limit(args: Namespace, name: str | None) -> int:
    """The positions that the model was made for."""
    if name is None:
        from ..shapes import shape

        return shape(args.synthetic.lower(), 1 << 30).max_position_embeddings
    from ..loading import read_config, resolve_model

    return read_config(resolve_model(name)).max_position_embeddings


def _tick(report: Progress, name: str, before: int, total: int, i: int) -> None:
    report(name, before + i, total)


def _model(args: Namespace, terminal: Terminal, name: str, ctx_size: int) -> Model:
    """The model; one with too little context is told in the words of the tests."""
    try:
        return open_model(args, terminal, name=name, ctx_size=ctx_size)
    except UsageError:
        limit = _limit(args, name)
        if args.ctx_size is not None or ctx_size <= limit:
            raise
        raise UsageError(
            f"the tests need {ctx_size} positions and {name} was made for {limit}: take fewer with "
            "--n-prompt, --n-gen or --depth"
        ) from None


@contextmanager
def _open(
    args: Namespace, terminal: Terminal, name: str | None, ctx_size: int
) -> Iterator[Subject]:
    """The model, or with --synthetic the shape of one with random weights."""
    from .measure import Subject

    if name is not None:
        with _model(args, terminal, name, ctx_size) as model:
            yield Subject.of(model)
        return
    from ..device import choose_device
    from ..engines import open_synthetic
    from ..session import Session
    from ..shapes import parameters, shape
    from ..weights import Traffic

    shape_name, kv, quant = args.synthetic.lower(), args.kv or "int8", args.quant or "q8"
    config = shape(shape_name, ctx_size)
    meter = LoadMeter()
    before = time.perf_counter()
    try:
        running = choose_device("cuda")
        engine = open_synthetic(config, quant, ctx_size, kv, running, meter)
    except CudaUnavailable as error:  # the CPU is no choice here
        raise CudaUnavailable(
            f"--synthetic measures a GPU, and none can be used: {error.why}; see `pykestrel doctor`"
        ) from None
    session = Session(engine)
    try:
        tell_residency(terminal, meter, engine)
        yield Subject(
            name=shape_name,
            config=config,
            session=session,
            running=running,
            quant=quant,
            kv=kv,
            ctx_size=ctx_size,
            traffic=Traffic.of(config, quant),
            parameters=parameters(config),
            load_s=time.perf_counter() - before,
            loaded=meter,
            synthetic=True,
        )
    finally:
        session.close()


def _ids(subject: Subject, length: int, given: list[int] | None) -> list[int]:
    """Test tokens: those given, repeated, else the same pseudo-random ones every time."""
    import numpy as np

    vocab = subject.config.vocab_size
    if given:
        from ..generate import check_ids

        given = check_ids(given, vocab)
        return (given * (length // len(given) + 1))[:length]
    return [int(i) for i in np.random.default_rng(0).integers(0, vocab, length)]


def _stats(subject: Subject) -> dict[str, Any]:
    stats = getattr(subject.session.engine, "stats", None)
    return dict(stats()) if callable(stats) else {}


def render(known: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """At most 100 columns wide; what all rows share stands below."""
    gpu = known.get("gpu") if known["backend"] == "cuda" else None  # a part on it: as on the CPU
    most = 24 if gpu is None else 15
    name = str(known["model"]).rstrip("/").rsplit("/", 1)[-1]
    name = name if len(name) <= most else name[: most - 1] + "…"
    head = ["model", "size", "quant", "test", "tokens/s", "ms/token", "GB/s"]
    if gpu is not None:
        head = ["model", "quant", "test", "tokens/s", "ms/token", "GB/s", "TFLOP/s", "of peak"]
    rows = [head]
    for r in results:
        rate, matrix_rate = r.get("gb_per_second"), r.get("tflop_per_second")
        share = r.get("percent_of_bandwidth", r.get("percent_of_matrix_peak"))
        speed = f"{r['tokens_per_second']:.2f} ± {r['spread']:.2f}"
        if "ttft_ms" in r:  # of the prompt as a whole
            speed = f"{r['ttft_ms']:.2f} ± {r['ttft_spread_ms']:.2f} ms"
        cells = {
            "model": name,
            "size": show_bytes(known["weight_bytes"]),
            "quant": known["quant"],
            "test": r["test"],
            "tokens/s": speed,
            "ms/token": ""
            if "ttft_ms" in r
            else f"{r['ms_per_token']:.{2 if gpu is None else 3}f}",
            "GB/s": "" if rate is None else f"{rate:.{2 if gpu is None else 0}f}",
            "TFLOP/s": "" if matrix_rate is None else f"{matrix_rate:.0f}",
            "of peak": f"{share:.1f} %" if share is not None else "",
        }
        rows.append([cells[column] for column in head])
    right = [i for i, column in enumerate(head) if column not in ("model", "quant", "test")]
    under = _under_cpu(known) if gpu is None else _under_gpu(known, gpu, results)
    if "load_line" in known:
        under += f"\n{known['load_line']}"
    return f"{table(rows, right=right)}\n\n{under}"


def _under_cpu(known: dict[str, Any]) -> str:
    blas = known["blas"]
    kernel = " ".join(str(blas[k]) for k in ("name", "version", "kernel") if blas.get(k))
    where = f"{known['backend']} with {plural(known['threads'], 'thread')}"
    if known["backend"] == "offload":
        where += f" ({known['running']})"
    return (
        f"{known['parameters'] / 1e6:.1f} M parameters, K/V {known['kv']}, "
        f"context {known['ctx_size']}, on {where}\n{known['processor']}; NumPy {known['numpy']}, "
        + (kernel or 'BLAS unknown: pip install "pykestrel[cpu]"')
    )


def _under_gpu(known: dict[str, Any], gpu: dict[str, Any], results: list[dict[str, Any]]) -> str:
    rate = gpu["read_bytes_per_second"]
    reads = f"reads {rate / 1e9:,.0f} GB/s at best (the peak)" if rate else "read rate unknown"
    first = f"{known['parameters'] / 1e6:,.1f} M parameters"
    first += ", random weights" if known["synthetic"] else ""
    first += f", {show_bytes(known['weight_bytes'])} of weights, K/V {known['kv']}"
    second = f"{gpu['name']}, driver {gpu['driver'] or 'unknown'}, CUDA {gpu['driver_cuda']}"
    second += f", SM clock {gpu['sm_clock_mhz']} MHz; {reads}"
    lines = [f"{first}, context {known['ctx_size']}", second]
    if gpu["peak_matrix_flops"] and any("tflop_per_second" in r for r in results):
        peak = gpu["peak_matrix_flops"] / 1e12
        lines.append(f"{peak:,.0f} TFLOP/s of dense bf16 at that clock (the peak)")
    for r in results:
        if counts := r.get("per_token"):
            lines.append(
                f"{r['test']}: a token is {counts['launches']:.2f} launches, "
                f"{counts['h2d_copies']:.2f} copies there, {counts['d2h_copies']:.2f} back; "
                f"logits {r.get('logits_hash', 'unknown')}"
            )
    return "\n".join(lines)
