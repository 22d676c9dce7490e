"""PYKESTREL_VERIFY=1: every token on both engines, and the first quantity in which they differ.

The CPU continues with the device's K/V rows, each of which is compared with its own first: a code
at the edge of rounding goes the other way for the smallest difference in what it is made of, and
that is 1/127 of a head's largest element, which grows from layer to layer. Otherwise nothing
smaller than that growth could be called a difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...config import ModelConfig

if TYPE_CHECKING:
    from ..cpu import CpuEngine
    from ..cpu.kv_cache import StoredRows

F32: TypeAlias = NDArray[np.float32]

# Of the largest magnitude of a quantity. bf16 products are made of rounded parts; q8 and q4 are
# exact integer products of an activation that is split in two.
TOLERANCE: Final = {"bf16": 2e-2, "q8": 2e-3, "q4": 2e-3}


@dataclass(frozen=True)
class Difference:
    """Where two engines differ first, in the order in which a token computes."""

    position: int
    layer: int | None  # None: the logits
    quantity: str  # a name of vcuda.h's trace, "k", "v" or "logits"
    index: int
    device: float
    cpu: float
    relative: float  # the difference over the largest magnitude of the quantity

    def __str__(self) -> str:
        where = "" if self.layer is None else f" of layer {self.layer}"
        return (
            f"the GPU and the CPU differ at position {self.position} in {self.quantity}"
            f"[{self.index}]{where}: {self.device:.6g} and {self.cpu:.6g}, "
            f"{self.relative:.2e} of the largest value"
        )


def sections(config: ModelConfig) -> Iterator[tuple[int, str, int]]:
    """(layer, quantity, floats) of a token's trace, in its order."""
    c = config
    for i, moe in enumerate(c.layer_is_moe):
        yield i, "qkv", c.q_dim + 2 * c.kv_dim
        yield i, "attended", c.q_dim
        yield i, "after_attention", c.hidden_size
        if moe:
            yield i, "router", c.num_experts
            yield i, "hidden", c.num_experts_per_tok * c.moe_intermediate_size
        else:
            yield i, "hidden", c.intermediate_size
        yield i, "after_mlp", c.hidden_size


class Verifier:
    """Runs the tokens that a device has run on a CpuEngine, and compares; warns once."""

    def __init__(self, cpu: CpuEngine, config: ModelConfig, quant: str) -> None:
        self.cpu = cpu
        self.difference: Difference | None = None  # once one was found nothing more is compared
        self.tokens = 0  # that were compared
        self._sections = list(sections(config))
        self._tolerance = TOLERANCE[quant]

    @property
    def trace_size(self) -> int:
        return sum(n for _, _, n in self._sections)

    def compare(
        self, token: int, trace: F32, logits: F32 | None, rows: Iterable[StoredRows]
    ) -> None:
        """Run ``token`` on the CPU too; ``trace``, ``logits`` and ``rows`` (the token's K/V, layer
        by layer) are the device's."""
        position = self.cpu.position
        found = self.difference is not None
        device_rows = list(rows)
        sections = iter(self._sections)
        at = 0

        def on_trace(layer: int, quantity: str, values: F32) -> None:
            nonlocal at
            where, name, n = next(sections)
            assert (where, name) == (layer, quantity), "the traces have the same order"
            self._look(position, layer, quantity, trace[at : at + n], values.reshape(-1))
            at += n

        def on_row(layer: int, row: StoredRows) -> StoredRows:
            mine, given = row, device_rows[layer]
            for i, quantity in ((0, "k"), (1, "v")):
                got, want = values_of(given[i], given[i + 2]), values_of(mine[i], mine[i + 2])
                step = float(mine[i + 2].max(initial=0.0))  # a code may fall to its neighbour
                self._look(position, layer, quantity, got, want, step)
            return given

        self.cpu.trace, self.cpu.on_row = on_trace, on_row
        try:
            cpu_logits = self.cpu.forward([token])
        finally:
            self.cpu.trace = self.cpu.on_row = None
        if found:
            return
        self.tokens += 1
        if logits is not None:
            self._look(position, None, "logits", logits, cpu_logits)

    def _look(
        self,
        position: int,
        layer: int | None,
        quantity: str,
        got: F32,
        want: F32,
        allowed: float = 0.0,
    ) -> None:
        if self.difference is not None:
            return
        with np.errstate(invalid="ignore"):
            error = np.abs(got - want)
        largest = float(np.abs(want).max(initial=0.0))
        bad = ~(error <= self._tolerance * largest + allowed)  # a NaN is bad too
        if not bad.any():
            return
        index = int(np.argmax(bad))
        relative = float(error[index]) / largest if largest else float("inf")
        self.difference = Difference(
            position, layer, quantity, index, float(got[index]), float(want[index]), relative
        )
        warnings.warn(str(self.difference), stacklevel=2)


def values_of(codes: NDArray[Any], scales: F32) -> F32:
    """A stored row ``[1, kv_dim]`` as float32 ``[kv_dim]``; no scales: it is float16."""
    values: F32 = codes.reshape(-1).astype(np.float32)
    if scales.size:
        values *= np.repeat(scales.reshape(-1), values.size // scales.size)
    return values
