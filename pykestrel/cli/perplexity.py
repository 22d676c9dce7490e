"""Score a text: mean negative log-likelihood a token, and perplexity.

With several --quant kinds every kind scores the same tokens, and the others are compared with the
first: difference of the mean, Kullback-Leibler divergence, and how often the most likely token is
the same.

Scoring: every token but the first is scored once. The text goes through windows of --ctx-size
tokens that move on by --stride; a window scores the tokens that no window before it did, so each
has at least ctx-size minus stride tokens of context (except in the first window).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..units import plural
from .flags import (
    COMMON,
    CPU_CACHE,
    DEVICE,
    JSON,
    KV,
    MODEL,
    PART,
    PREFILL,
    PROMPT_IDS,
    THREADS,
    VERIFY,
)
from .models import model_name, open_model, refuse_model_word
from .options import Option, add_groups, count, limit, listed, one_of
from .options import text as plain_text
from .terminal import Terminal, read_text_file, table

if TYPE_CHECKING:
    from ..model import Model

_SHARED_CACHE = 256_000_000  # bytes of expanded weights for each model when several are loaded

OPTIONS = (
    Option(
        ("--quant",), "one kind, or several to compare with the first: bf16,q8,q4",
        listed(one_of("bf16", "q8", "q4")), "KIND,..",
        default="what a quantised directory holds, else q8",
    ),
    Option(("-c", "--ctx-size"), "tokens of a window", count, "N", default="512"),
    Option(("--stride",), "tokens that a window moves on", count, "N", default="ctx-size / 2"),
    Option(
        ("-n", "--max-tokens"), "score the first N tokens of the text only; -1: all", limit, "N"
    ),
    PROMPT_IDS,
)  # fmt: skip


def configure(parser: ArgumentParser) -> list[Option]:
    parser.add_argument("file", nargs="?", metavar="FILE", help="a UTF-8 text file; - is stdin")
    model = (MODEL, *OPTIONS, KV, *PART, CPU_CACHE, DEVICE, THREADS, PREFILL, VERIFY)
    return add_groups(parser, {"model": model, "output": (JSON, *COMMON)})


def run(args: Namespace, terminal: Terminal) -> int:
    if (args.file is None) == (args.prompt_ids is None):
        raise UsageError("give one text file (- is stdin), or --prompt-ids")
    if args.file is not None:
        refuse_model_word(args, args.file, "FILE is a text to score")
    text = None if args.file is None else read_text_file(plain_text(args.file, "FILE"), terminal)
    ctx = 512 if args.ctx_size is None else args.ctx_size
    stride = max(1, ctx // 2) if args.stride is None else args.stride
    if ctx < 2 or not 1 <= stride < ctx:
        raise UsageError(
            f"--stride must be at least 1 and less than --ctx-size {ctx}, got {stride}"
        )
    kinds: list[str | None] = args.quant or [None]
    if len(set(kinds)) < len(kinds):
        raise UsageError(f"--quant names a kind twice: {','.join(map(str, kinds))}")
    name = model_name(args, terminal, demo="pulled")
    kv = args.kv or "int8"
    from .scoring import score

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
        facts = {"model": name, "ctx_size": ctx, "stride": stride, "kv": kv}
        terminal.json({**facts, "results": results})
    else:
        scored = plural(results[0]["tokens"], "token")
        terminal.line(_table(results))
        terminal.line(f"\n{scored} scored, windows of {ctx} that move on by {stride}, K/V {kv}")
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
    if args.max_tokens is not None and args.max_tokens >= 0:
        ids = ids[: args.max_tokens + 1]
    if len(ids) < 2:
        raise UsageError(
            f"the text has {plural(len(ids), 'token')}; at least 2 are needed to score one"
        )
    return check_ids(ids, model.config.vocab_size), bos


def _table(results: list[dict[str, Any]]) -> str:
    """At most 100 columns wide; what all rows share stands below."""
    head = ["quant", "nll", "perplexity"]
    compared = len(results) > 1
    first = results[0]["quant"]
    if compared:
        head += [f"Δ nll to {first}", "Δ %", "KL", "same top"]
    rows = [head]
    for r in results:
        row = [
            r["quant"],
            _with_error(r["nll"], r["nll_stderr"], ".4f"),
            _with_error(r["perplexity"], r["perplexity_stderr"], ".3f"),
        ]
        if "kl" in r:
            row += [
                _with_error(r["delta_nll"], r["delta_nll_stderr"], "+.4f"),
                f"{r['delta_percent']:+.3f}",
                f"{r['kl']:.5f}",
                f"{r['same_top_percent']:.2f} %",
            ]
        elif compared:
            row += ["", "", "", ""]
        rows.append(row)
    return table(rows, right=range(1, len(head)))


def _with_error(value: float, error: float | None, form: str) -> str:
    if abs(value) >= 1e5:  # of no use as it is, and too wide for the table
        form = ".1e"
    return f"{value:{form}} ± " + ("-" if error is None else f"{error:{form.lstrip('+')}}")
