"""Score a text: mean negative log-likelihood a token, and perplexity.

With several --quant kinds every kind scores the same tokens, and the others are compared with the
first: difference of the mean, Kullback-Leibler divergence, and how often the most likely token is
the same.

Scoring: every token but the first is scored once. The text goes through windows of --ctx-size
tokens that move on by --stride; a window scores the tokens that no window before it did, so each
has at least ctx-size minus stride tokens of context (except in the first window).
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericsError, UsageError
from .flags import COMMON, CPU_CACHE, DEVICE, JSON, KV, MODEL, PROMPT_IDS
from .models import model_name, open_model
from .options import Option, add_groups, count, listed, one_of
from .options import text as plain_text
from .terminal import Terminal, read_text_file, table

if TYPE_CHECKING:
    from ..model import Model

_LOGITS_BYTES = 128_000_000  # of one model at a time; a few arrays of that size are in use
_SHARED_CACHE = 256_000_000  # bytes of expanded weights for each model when several are loaded

OPTIONS = (
    Option(
        ("--quant",), "one kind, or several to compare with the first: bf16,q8,q4",
        listed(one_of("bf16", "q8", "q4")), "KIND,..",
        default="what a quantised directory holds, else q8",
    ),
    Option(("-c", "--ctx-size"), "tokens of a window", count, "N", default="512"),
    Option(("--stride",), "tokens that a window moves on", count, "N", default="ctx-size / 2"),
    Option(("-n", "--max-tokens"), "score the first N tokens of the text only", count, "N"),
    PROMPT_IDS,
)  # fmt: skip


def configure(parser: ArgumentParser) -> list[Option]:
    parser.add_argument("file", nargs="?", metavar="FILE", help="a UTF-8 text file; - is stdin")
    model = (MODEL, *OPTIONS, KV, CPU_CACHE, DEVICE)
    return add_groups(parser, {"model": model, "output": (JSON, *COMMON)})


@dataclass
class Score:
    """What one model made of the tokens; one entry a scored token."""

    quant: str
    nll: list[NDArray[np.float64]] = field(default_factory=list)
    kl: list[NDArray[np.float64]] = field(default_factory=list)  # from the first model to this
    same_top: list[NDArray[np.bool_]] = field(default_factory=list)

    def summary(self, first: Score) -> dict[str, Any]:
        """Means and standard errors; the comparison where this is not the first."""
        nll = np.concatenate(self.nll)
        mean, error = float(nll.mean()), standard_error(nll)
        result: dict[str, Any] = {
            "quant": self.quant,
            "tokens": len(nll),
            "nll": mean,
            "nll_stderr": error,
            "perplexity": math.exp(mean),
            "perplexity_stderr": math.exp(mean) * error,
        }
        if first is not self:
            delta = nll - np.concatenate(first.nll)
            result["delta_nll"] = float(delta.mean())
            result["delta_nll_stderr"] = standard_error(delta)  # paired: the same tokens
            result["delta_percent"] = 100 * float(delta.mean()) / (mean - float(delta.mean()))
            result["kl"] = float(np.concatenate(self.kl).mean())
            result["same_top_percent"] = 100 * float(np.concatenate(self.same_top).mean())
        return result


def standard_error(values: NDArray[np.float64]) -> float:
    """Of the mean; 0 for a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def run(args: Namespace, terminal: Terminal) -> int:
    if (args.file is None) == (args.prompt_ids is None):
        raise UsageError("give one text file (- is stdin), or --prompt-ids")
    text = None if args.file is None else read_text_file(plain_text(args.file, "FILE"))
    ctx = 512 if args.ctx_size is None else args.ctx_size
    stride = max(1, ctx // 2) if args.stride is None else args.stride
    if ctx < 2 or not 1 <= stride < ctx:
        raise UsageError(
            f"--stride must be at least 1 and less than --ctx-size {ctx}, got {stride}"
        )
    kinds: list[str | None] = args.quant or [None]
    if len(set(kinds)) < len(kinds):
        raise UsageError(f"--quant names a kind twice: {','.join(map(str, kinds))}")
    name = model_name(args, terminal)

    with ExitStack() as stack:
        cache = args.cpu_cache
        if cache is None and len(kinds) > 1:
            cache = _SHARED_CACHE
        args.quant = None
        models = []
        for kind in kinds:
            model = open_model(args, terminal, name=name, quant=kind, ctx_size=ctx, cpu_cache=cache)
            models.append(stack.enter_context(model))
        ids, bos = _tokens(models[0], args, text)
        scores = score(models, ids, bos, ctx, stride, terminal)
    results = [s.summary(scores[0]) for s in scores]
    if args.json:
        facts = {"model": name, "ctx_size": ctx, "stride": stride, "kv": args.kv or "int8"}
        terminal.line(json.dumps({**facts, "results": results}, ensure_ascii=False))
    else:
        terminal.line(_table(results))
    return 0


def _tokens(model: Model, args: Namespace, text: str | None) -> tuple[list[int], list[int]]:
    """The ids to score, and what the tokenizer puts before every text (a BOS, or nothing)."""
    from ..generate import check_ids

    bos: list[int] = []
    if text is None:
        ids = list(args.prompt_ids)
    else:
        ids = model.tokenizer.encode(text)
        start = model.tokenizer.bos_token_id
        bos = [start] if start is not None and ids[:1] == [start] else []
    if args.max_tokens is not None:
        ids = ids[: args.max_tokens + 1]
    if len(ids) < 2:
        raise UsageError(f"the text has {len(ids)} tokens; at least 2 are needed to score one")
    return check_ids(ids, model.config.vocab_size), bos


def windows(total: int, ctx: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, first scored, end) of every window over ``total`` tokens.

    Token j in [first scored, end) is scored from tokens start..j-1.
    """
    done, end = 1, min(ctx, total)
    while True:
        yield max(0, end - ctx), done, end
        if end == total:
            return
        done, end = end, min(end + stride, total)


def score(
    models: list[Model], ids: list[int], bos: list[int], ctx: int, stride: int, terminal: Terminal
) -> list[Score]:
    """Score ``ids[1:]`` with every model, in step, so that whole distributions can be compared
    without keeping them."""
    scores = [Score(model.quant) for model in models]
    rows = max(1, _LOGITS_BYTES // (4 * models[0].config.vocab_size))
    with terminal.progress("scoring", unit="tokens") as report:
        for start, first, end in windows(len(ids), ctx, stride):
            window = [*bos, *ids[start + len(bos) : end - 1]] if start else ids[start : end - 1]
            split = first - 1 - start  # up to here nothing is scored: no logits are needed
            for model in models:
                model.session.rewind(0)
                if split:
                    model.session.extend(window[:split])
            for lo in range(split, len(window), rows):
                piece = window[lo : lo + rows]
                at = start + lo + 1
                targets = np.array(ids[at : at + len(piece)])
                _score_piece(models, scores, piece, targets)
                report("", at + len(piece) - 1, len(ids) - 1)
    return scores


def _score_piece(
    models: list[Model], scores: list[Score], piece: list[int], targets: NDArray[np.int64]
) -> None:
    reference: NDArray[np.float32] | None = None
    rows = np.arange(len(targets))
    for model, into in zip(models, scores, strict=True):
        logp = log_softmax(model.session.extend(piece, all_logits=True))
        nll = -logp[rows, targets].astype(np.float64)
        if not np.isfinite(nll).all():
            raise NumericsError(
                f"a logit is not finite at {model.quant}: {model.name} cannot be scored"
            )
        into.nll.append(nll)
        if reference is None:
            reference = logp
        else:
            gap = np.exp(reference) * (reference - logp)
            into.kl.append(gap.sum(axis=1, dtype=np.float64))
            into.same_top.append(reference.argmax(axis=1) == logp.argmax(axis=1))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Row by row, in place: float32 [rows, V]; the sum is taken in float64."""
    logits -= logits.max(axis=1, keepdims=True)
    total = np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)
    logits -= np.log(total).astype(np.float32)
    return logits


def _table(results: list[dict[str, Any]]) -> str:
    head = ["quant", "tokens", "nll", "perplexity"]
    compared = len(results) > 1
    first = results[0]["quant"]
    if compared:
        head += [f"Δ nll to {first}", "Δ %", f"KL from {first}", "same top-1 %"]
    rows = [head]
    for r in results:
        row = [
            r["quant"],
            str(r["tokens"]),
            f"{r['nll']:.4f} ± {r['nll_stderr']:.4f}",
            f"{r['perplexity']:.3f} ± {r['perplexity_stderr']:.3f}",
        ]
        if "kl" in r:
            row += [
                f"{r['delta_nll']:+.5f} ± {r['delta_nll_stderr']:.5f}",
                f"{r['delta_percent']:+.3f}",
                f"{r['kl']:.5f}",
                f"{r['same_top_percent']:.2f}",
            ]
        elif compared:
            row += ["", "", "", ""]
        rows.append(row)
    return table(rows, right=range(1, len(head)))
