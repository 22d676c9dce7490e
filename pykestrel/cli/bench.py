"""Measure prefill and decode speed.

ppN is a prompt of N tokens in one forward pass, tgN is N tokens one at a time; each is timed --runs
times after a warm-up. GB/s counts the bytes of weights and K/V that a token must read.
"""

from __future__ import annotations

import gc
import statistics
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..units import plural, show_bytes
from .flags import COMMON, JSON, LOADING, PROMPT_IDS, YES
from .models import model_name, open_model
from .options import Option, add_groups, count, exclude, listed
from .terminal import Terminal, table

if TYPE_CHECKING:
    from ..model import Model

TESTS = (
    Option(
        ("-p", "--n-prompt"), "prompt lengths, 0: none", listed(count), "N,..", default="512"
    ),
    Option(
        ("-n", "--n-gen", "--max-tokens", "--n-predict"),
        "lengths of generation, 0: none", listed(count), "N,..", default="128",
    ),
    Option(
        ("-d", "--depth"), "tokens already in the context when a test begins", listed(count),
        "N,..", default="0",
    ),
    Option(("-r", "--runs"), "how often each test is timed", count, "N", default="3"),
    PROMPT_IDS,
)  # fmt: skip


def configure(parser: ArgumentParser) -> list[Option]:
    groups = {"tests": TESTS, "model": (*LOADING, YES), "output": (JSON, *COMMON)}
    return add_groups(parser, groups)


@dataclass(frozen=True)
class Test:
    """One row: ``kind`` "pp" or "tg", ``n`` tokens, after ``depth`` tokens of context."""

    kind: str
    n: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.n}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def positions(self) -> int:
        return self.depth + self.n + (1 if self.kind == "tg" else 0)


def run(args: Namespace, terminal: Terminal) -> int:
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
    runs = 3 if args.runs is None else args.runs
    if not tests or runs < 1:
        raise UsageError("nothing to measure: every test has 0 tokens or --runs is 0")
    longest = max(test.positions for test in tests)
    if args.ctx_size is not None and args.ctx_size < longest:
        raise UsageError(f"--ctx-size {args.ctx_size} is too small: the tests need {longest}")

    name = model_name(args, terminal, demo="offer")
    with open_model(args, terminal, name=name, ctx_size=args.ctx_size or longest) as model:
        facts = model_facts(model)
        note = facts["blas_note"]
        if note:
            terminal.warn(str(note))
        ids = _ids(model, longest, args.prompt_ids)
        results = []
        with terminal.progress("measuring", unit="runs") as report:
            total = len(tests) * (runs + 1)
            for done, test in enumerate(tests):
                samples = measure(
                    model, test, ids, runs,
                    lambda i, t=test, d=done: report(t.name, d * (runs + 1) + i, total),
                )  # fmt: skip
                results.append(summary(model, test, samples))
        facts["engine_stats"] = _stats(model)
    if args.json:
        terminal.json({**facts, "tests": results})
    else:
        terminal.line(_table(facts, results))
    return 0


def _ids(model: Model, length: int, given: list[int] | None) -> list[int]:
    """Test tokens: those given, repeated, else the same pseudo-random ones every time."""
    import numpy as np

    vocab = model.config.vocab_size
    if given:
        from ..generate import check_ids

        given = check_ids(given, vocab)
        return (given * (length // len(given) + 1))[:length]
    return [int(i) for i in np.random.default_rng(0).integers(0, vocab, length)]


def measure(model: Model, test: Test, ids: list[int], runs: int, tick: Any) -> list[float]:
    """Seconds of each timed run. The first run is a warm-up and is not among them."""
    session = model.session
    samples: list[float] = []
    start = test.depth + (1 if test.kind == "tg" else 0)
    for i in range(runs + 1):
        tick(i)
        session.rewind(min(start, session.position))
        if session.position < start:
            session.extend(ids[session.position : start])
        gc.collect()
        before = time.perf_counter()
        if test.kind == "pp":
            session.extend(ids[start : start + test.n])
        else:
            for token in ids[start : start + test.n]:
                session.extend([token])
        samples.append(time.perf_counter() - before)
        session.rewind(start)
    tick(runs + 1)
    return samples[1:]


def summary(model: Model, test: Test, samples: list[float]) -> dict[str, Any]:
    """Speed of one test: mean and standard deviation over the runs; bytes are a token's."""
    speeds = [test.n / seconds for seconds in samples]
    result: dict[str, Any] = {
        "test": test.name,
        "kind": test.kind,
        "n": test.n,
        "depth": test.depth,
        "seconds": samples,
        "tokens_per_second": statistics.fmean(speeds),
        "spread": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "ms_per_token": 1000 * statistics.median(samples) / test.n,
    }
    if test.kind == "tg":
        weights = model.traffic.token
        kv = model.kv_bytes_per_position * (test.depth + test.n / 2)  # halfway through the test
        result["weight_bytes_per_token"] = weights
        result["kv_bytes_per_token"] = round(kv)
        result["gb_per_second"] = (weights + kv) * result["tokens_per_second"] / 1e9
    return result


def model_facts(model: Model) -> dict[str, Any]:
    """What was measured, on what."""
    from .. import __version__, machine
    from ..loading import describe

    numpy = machine.numpy_blas()
    blas = numpy["blas"]
    return {
        "pykestrel": __version__,
        "model": model.name,
        "parameters": describe(model.source).parameters,
        "weight_bytes": model.traffic.weights,
        "backend": model.engine.name,
        "threads": model.threads or blas.get("threads") or machine.cores(),
        "processor": machine.cpuinfo().get("model name", "unknown"),
        "numpy": numpy["version"],
        "blas": blas,
        "blas_note": numpy["note"],
        "quant": model.quant,
        "kv": model.kv,
        "ctx_size": model.ctx_size,
        "load_seconds": model.load_s,
    }


def _stats(model: Model) -> dict[str, Any]:
    stats = getattr(model.session.engine, "stats", None)
    return dict(stats()) if callable(stats) else {}


def _table(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """At most 100 columns wide; what all rows share stands below."""
    name = str(facts["model"]).rstrip("/").rsplit("/", 1)[-1]
    name = name if len(name) <= 24 else name[:23] + "…"
    rows = [["model", "size", "quant", "test", "tokens/s", "ms/token", "GB/s"]]
    for r in results:
        rows.append([
            name,
            show_bytes(facts["weight_bytes"]),
            facts["quant"],
            r["test"],
            f"{r['tokens_per_second']:.2f} ± {r['spread']:.2f}",
            f"{r['ms_per_token']:.2f}",
            f"{r['gb_per_second']:.2f}" if "gb_per_second" in r else "",
        ])  # fmt: skip
    blas = facts["blas"]
    kernel = " ".join(str(blas[k]) for k in ("name", "version", "kernel") if blas.get(k))
    under = (
        f"{facts['parameters'] / 1e6:.1f} M parameters, K/V {facts['kv']}, "
        f"context {facts['ctx_size']}, on {facts['backend']} with "
        f"{plural(facts['threads'], 'thread')}\n{facts['processor']}; NumPy {facts['numpy']}, "
        + (kernel or 'BLAS unknown: pip install "pykestrel[cpu]"')
    )
    return f"{table(rows, right=(1, 4, 5, 6))}\n\n{under}"
