"""The arithmetic of `pykestrel perplexity`: windows over a text, and what models make of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericsError
from .terminal import Terminal

if TYPE_CHECKING:
    from ..model import Model

_LOGITS_BYTES = 128_000_000  # of one model at a time; a few arrays of that size are in use


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
            "perplexity_stderr": None if error is None else math.exp(mean) * error,
        }
        if first is not self:
            delta = nll - np.concatenate(first.nll)
            result["delta_nll"] = float(delta.mean())
            result["delta_nll_stderr"] = standard_error(delta)  # paired: the same tokens
            result["delta_percent"] = 100 * float(delta.mean()) / (mean - float(delta.mean()))
            result["kl"] = float(np.concatenate(self.kl).mean())
            result["same_top_percent"] = 100 * float(np.concatenate(self.same_top).mean())
        return result


def standard_error(values: NDArray[np.float64]) -> float | None:
    """Of the mean; None for a single value, which tells nothing of it."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


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
