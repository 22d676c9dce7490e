"""The device's side of the offload set: what is there, what is worth a round trip, what came of it.

`Device` is the CPU engine's `Offload`: it is asked for layers and for products, takes what lies in
its cache and is above the gate, and gives everything else back. A product that the library refuses
is computed on the CPU, and said once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ... import native
from ...errors import NativeError
from ...native import Handle, abi
from ..cpu.linear import Linear
from ..cpu.offload import Compute, Job
from .experts import Experts
from .plan import Residency, Weight
from .table import Reason, Table

if TYPE_CHECKING:
    from ..cpu.kv_cache import StoredRows

F32: TypeAlias = NDArray[np.float32]

MIN_FLOP: Final = 10_000_000  # of a round trip of 100 us; used where nothing can be measured

# Of the largest magnitude of a result. q8 and q4 weights meet 16-bit integers, or are rounded to
# float16 where there are many rows; bf16 weights meet two or three bfloat16 parts of an activation.
TOLERANCE: Final = {"bf16": 2e-3, "q8": 2e-3, "q4": 2e-3}


# Floats of one call's results: the library keeps room for them on both sides.
_MOST_RESULTS: Final = 1 << 24


class SegmentLost(NativeError):
    """The device is lost, and with it the K/V of the layers that ran there."""


class Device:
    """Takes what it can of a CpuEngine's work; ``handle`` holds the weights of ``residency``."""

    def __init__(
        self,
        handle: Handle,
        residency: Residency,
        quant: str,
        *,
        min_flop: float,
        verify: bool = False,
        table: Table | None = None,
        experts: Experts | None = None,
    ) -> None:
        self._handle: Handle | None = handle
        self._weights = {weight.place: weight for weight in residency.weights}
        # Verification looks at products; those of a segment would not be seen.
        self.segment = range(0) if verify else residency.segment
        self.min_flop = min_flop
        self.failure: str | None = None  # why nothing is taken any more
        self.checked = 0  # results that were verified
        self.failed = 0  # and were wrong
        # The CPU lacks K/V of the segment: set before anything that may fail or be interrupted.
        self.lost = False
        self._refused = False
        self.take_rows: Callable[[int, StoredRows], None] | None = None
        self.read_rows: Callable[[Handle, int], Iterable[StoredRows]] | None = None
        self._tolerance = TOLERANCE[quant]
        self._verify = verify
        self._table = table
        self._experts = experts
        self._calls: dict[tuple[Job, ...], native.Products] = {}

    # ---- Offload

    def layers(self, first: int, x: F32, position: int) -> int:
        handle = self._handle
        if handle is None or not self.segment or first != self.segment.start:
            return first
        began = time.perf_counter()
        try:
            if native.kv_position(handle) != position:
                native.kv_seek(handle, position)
            native.dev_layers_run(handle, position, x)
        except NativeError as error:
            self._leave_segment(error, position)
            return first
        if self._table is not None:
            self._table.segment(self.segment, time.perf_counter() - began)
        return self.segment.stop

    def products(self, x: F32, out: F32, jobs: Sequence[Job], on_cpu: Compute) -> None:
        if self._experts is not None and jobs[0].linear.place.kind == "expert_gate_up":
            self._experts.count(jobs)
        mine, reasons = self._sort(jobs)
        rest = list(reasons)
        if mine and self._run(x, out, mine):
            if self._verify:
                self._compare(x, out, mine, on_cpu)
        elif mine:
            rest += mine
            reasons |= dict.fromkeys(mine, Reason.REFUSED)
        if rest:
            began = time.perf_counter()
            on_cpu(x, out, rest)
            if self._table is not None:
                self._table.on_cpu(reasons, time.perf_counter() - began)

    def close(self) -> None:
        """Let go of the handle, and of the matrices."""
        self._handle = self._experts = None
        self._calls.clear()

    # ---- which

    @property
    def weights(self) -> int:
        """How many lie in the cache for products."""
        return len(self._weights)

    def learn(self, weights: Iterable[Weight]) -> None:
        """They lie in the cache now."""
        self._weights |= {weight.place: weight for weight in weights}

    def forget(self, weights: Iterable[Weight]) -> None:
        """They will not for much longer."""
        for weight in weights:
            self._weights.pop(weight.place, None)

    def _sort(self, jobs: Sequence[Job]) -> tuple[list[Job], dict[Job, Reason]]:
        """The jobs of the device, and why not the others. What goes in one call is worth one round
        trip together."""
        if self._handle is None:
            return [], dict.fromkeys(jobs, Reason.REFUSED)
        mine = [job for job in jobs if job.linear.place in self._weights]
        reasons = dict.fromkeys(
            (job for job in jobs if job.linear.place not in self._weights), Reason.ABSENT
        )
        flop = sum(2 * job.rows * job.linear.n * job.linear.k for job in mine)
        if flop < self.min_flop:
            reasons |= dict.fromkeys(mine, Reason.SMALL)
            mine = []
        return mine, reasons

    # ---- one call

    def _run(self, x: F32, out: F32, jobs: list[Job]) -> bool:
        handle = self._handle
        assert handle is not None
        before = None if self._table is None else native.prof_read(handle)
        try:
            for part_x, part_out, part in _in_parts(x, out, jobs):
                calls = self._products_of(part, out.shape[-1])
                native.dev_gemm_fused(handle, calls, part_x, part_out)
        except NativeError as error:
            self.refuse(error)
            return False
        for job in jobs:
            if job.linear.bias is not None:
                out[job.to : job.to + job.rows] += job.linear.bias
        if self._table is not None and before is not None:
            self._table.on_device(jobs, before, native.prof_read(handle))
        return True

    def _products_of(self, jobs: list[Job], n: int) -> native.Products:
        """As the library takes them; those of one token are the same for every token."""
        key = tuple(jobs)
        found = self._calls.get(key)
        if found is None:
            found = native.Products(
                [
                    native.Product(
                        key=self._weights[job.linear.place].key,
                        index=-1,
                        first=job.first,
                        rows=job.rows,
                        y=job.to * n,
                        stride=n,
                    )
                    for job in jobs
                ]
            )
            if key == (Job(jobs[0].linear, 1),):  # others may begin at any row
                self._calls[key] = found
        return found

    def _compare(self, x: F32, out: F32, jobs: list[Job], on_cpu: Compute) -> None:
        """What NumPy makes of the same; counts, and warns of the first difference."""
        for job in jobs:
            mine = out[job.to : job.to + job.rows]
            want = np.empty_like(mine)
            on_cpu(x, want, [job._replace(to=0)])
            with np.errstate(invalid="ignore"):
                error = np.abs(mine - want)
            largest = float(np.abs(want).max(initial=0.0))
            self.checked += 1
            if (error <= self._tolerance * largest).all():
                continue
            self.failed += 1
            bad = ~(error <= self._tolerance * largest)  # a NaN is bad too
            row, column = np.unravel_index(int(np.argmax(bad)), bad.shape)
            if self.failed == 1:
                warnings.warn(
                    f"the GPU and the CPU differ in {job.linear.place}, row {row}, column {column}:"
                    f" {mine[row, column]:.6g} and {want[row, column]:.6g}, the largest value is "
                    f"{largest:.6g}",
                    stacklevel=2,
                )

    # ---- the way back

    def _leave_segment(self, error: NativeError, position: int) -> None:
        """The CPU computes the layers of the segment from here on, with the K/V that it had."""
        handle, segment = self._handle, self.segment
        assert handle is not None
        self.lost = True
        self.segment = range(0)
        if error.status >= abi.NOT_DONE and self.take_rows and self.read_rows:
            try:
                rows = list(self.read_rows(handle, position))
            except NativeError as other:
                error = other
            else:
                for layer, of_layer in zip(segment, rows, strict=True):
                    self.take_rows(layer, of_layer)
                self.lost = False
                self._warn(
                    f"layers {segment.start} to {segment.stop - 1} run on the CPU from here on, "
                    f"from the same K/V: {error}"
                )
                return
        self._stop(str(error))

    def refuse(self, error: NativeError) -> None:
        """The library did not do something; what it was to do, the CPU does. SegmentLost when that
        is not enough: the K/V of whole layers went with the device."""
        if error.status < abi.NOT_DONE:
            self._stop(str(error))
        elif not self._refused:
            self._refused = True
            self._warn(f"the CPU computes what the GPU does not: {error}")

    def _stop(self, why: str) -> None:
        """Nothing is taken any more."""
        self.lost = self.lost or bool(self.segment)
        self._warn(f"running on the CPU from here on: {why}")
        self.failure = why
        self._handle = None
        self.segment = range(0)
        if self.lost:
            raise SegmentLost(why, abi.LOST)

    def _warn(self, words: str) -> None:
        if self.failure is None:
            warnings.warn(words, stacklevel=4)

    # ---- before the first token

    def warm_up(self, hidden: int) -> None:
        """Have a segment's graph made; not in the table."""
        table, self._table = self._table, None
        try:
            if self.segment:
                self.layers(self.segment.start, np.zeros((1, hidden), np.float32), 0)
        finally:
            self._table = table

    def seconds(self, linear: Linear, rows: int = 1, repeats: int = 20) -> float:
        """Of a call with so many rows of a matrix that is there: the median of some."""
        assert self._handle is not None
        x = np.ones((rows, linear.k), np.float32)
        out = np.empty((rows, linear.n), np.float32)
        calls = self._products_of([Job(linear, rows)], linear.n)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            native.dev_gemm_fused(self._handle, calls, x, out)
            times.append(time.perf_counter() - began)
        return float(np.median(times))


def _in_parts(x: F32, out: F32, jobs: list[Job]) -> Iterator[tuple[F32, F32, list[Job]]]:
    """The same work in calls whose results are not too many: the head of a long prompt's."""
    if len(jobs) > 1 or jobs[0].rows * out.shape[-1] <= _MOST_RESULTS:
        yield x, out, jobs
        return
    linear, rows, first, to = jobs[0]
    step = max(1, _MOST_RESULTS // out.shape[-1])
    for lo in range(0, rows, step):
        n = min(step, rows - lo)
        yield x[first + lo :][:n], out[to + lo :][:n], [Job(linear, n)]
