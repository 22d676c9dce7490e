"""PYKESTREL_PROF=1: a row for every kind of product of the model, offloaded or not.

What is not on the device's path must be visible: a matrix that nobody offloads shows as calls on
the CPU, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from ...native import Prof
from ..cpu.linear import Place
from ..cpu.offload import Job

_PHASES: Final = ("cache_probe", "upload", "h2d", "gemm", "reduce", "d2h_sync")

_EMBEDDING: Final = "always on the CPU: a row of it"
_ROUTER: Final = "on the CPU but in a segment: float32 and small"


class Reason(Enum):
    """Why a product ran on the CPU."""

    ABSENT = "not on the device (--vram-budget)"
    SMALL = "below --min-flop"
    REFUSED = "refused by the library"


@dataclass
class Row:
    """Of one kind of product."""

    matrices: int = 0  # of the model
    resident: int = 0
    device_calls: int = 0
    device_products: int = 0
    phases: Counter[str] = field(default_factory=Counter)  # nanoseconds
    cpu_products: int = 0
    cpu_s: float = 0.0
    reasons: Counter[Reason] = field(default_factory=Counter)


class Table:
    """Counts what a `Device` does and leaves."""

    def __init__(
        self, places: Sequence[Place], resident: frozenset[Place], routers: tuple[int, int]
    ) -> None:
        """routers: those on the device, and all."""
        self.rows: dict[str, Row] = {}
        self._segments: dict[str, float] = {"calls": 0, "s": 0.0}
        self._segment: range = range(0)
        for place in places:
            row = self.rows.setdefault(place.kind, Row())
            row.matrices += 1
            row.resident += place in resident
        # What is no product of a `Device`; it is shown all the same.
        self._others = {"embedding": ((0, 1), _EMBEDDING)}
        if routers[1]:
            self._others["router"] = (routers, _ROUTER)

    def on_device(self, jobs: Sequence[Job], before: Prof, after: Prof) -> None:
        row = self.rows[jobs[0].linear.place.kind]
        row.device_calls += 1
        row.device_products += len(jobs)
        for name in _PHASES:
            row.phases[name] += getattr(after, name).ns - getattr(before, name).ns

    def on_cpu(self, reasons: Mapping[Job, Reason], seconds: float) -> None:
        for job, reason in reasons.items():
            row = self.rows[job.linear.place.kind]
            row.cpu_products += 1
            row.cpu_s += seconds / len(reasons)
            row.reasons[reason] += 1

    def segment(self, layers: range, seconds: float) -> None:
        self._segment = layers
        self._segments["calls"] += 1
        self._segments["s"] += seconds

    def render(self, title: str) -> str:
        """The table: microseconds of a call on the device by phase, each with its share, and of a
        product on the CPU."""
        head = ("", "on device", "calls", *_PHASES, "on the CPU", "us each", "why")
        lines = [f"PROF {title}: offload, microseconds of a call and their share", _line(head)]
        for kind, row in self.rows.items():
            total = sum(row.phases.values())
            cells = [kind, f"{row.resident}/{row.matrices}", str(row.device_calls)]
            for name in _PHASES:
                if not row.device_calls:
                    cells.append("-")
                    continue
                each = row.phases[name] / 1e3 / row.device_calls
                share = 100 * row.phases[name] / total if total else 0
                cells.append(f"{each:.1f} {share:.0f}%")
            cells.append(str(row.cpu_products))
            cells.append(f"{1e6 * row.cpu_s / row.cpu_products:.0f}" if row.cpu_products else "-")
            cells.append(", ".join(reason.value for reason, _ in row.reasons.most_common()) or "-")
            lines.append(_line(cells))
        for kind, ((there, matrices), why) in self._others.items():
            cells = [kind, f"{there}/{matrices}", "0", *["-"] * (len(_PHASES) + 2), why]
            lines.append(_line(cells))
        if self._segments["calls"]:
            calls = self._segments["calls"]
            lines.append(
                f"  layers {self._segment.start} to {self._segment.stop - 1} as one segment: "
                f"{calls:.0f} calls, {1e6 * self._segments['s'] / calls:.0f} us each"
            )
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"  {cells[0]:<15}" + "".join(f"{cell:>13}" for cell in cells[1:-1]) + "  " + cells[-1]
