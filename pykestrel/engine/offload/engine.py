"""The CPU engine with a device beside it that cannot hold the whole model.

The layer loop is CpuEngine's. Before each layer and each product the `Device` is asked; what it
does not take, the CPU computes. So a result never depends on what fits, only the time does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ... import native
from ...errors import NativeError, OutOfMemory
from ...native import Handle, abi
from ...native.decode import DecodeConfig
from ..checks import check_truncation
from ..cpu.linear import Linear, Place, multiply
from ..cpu.workers import Workers
from ..cuda import prof, stored_rows
from .device import MIN_FLOP, Device, SegmentLost
from .experts import Experts
from .plan import Residency
from .table import Table

if TYPE_CHECKING:
    from ..cpu import CpuEngine

F32: TypeAlias = NDArray[np.float32]


class OffloadEngine:
    """One sequence on the CPU with some weights on a GPU; see `pykestrel.engine.Engine`.

    The engine takes ``cpu`` and ``handle`` over; the cache of ``handle`` holds the weights of
    ``residency`` (see `uploads.py`), and where that has a segment, ``segment`` is the configuration
    that the handle's decoder was made with. ``min_flop``: products of fewer operations stay on the
    CPU; None: measured here. ``verify``: every product of the device is compared with NumPy's;
    layers do not run as a segment then. ``experts``: moves those that the router picks to the
    device.
    """

    def __init__(
        self,
        cpu: CpuEngine,
        handle: Handle,
        residency: Residency,
        quant: str,
        *,
        segment: DecodeConfig | None = None,
        min_flop: float | None = None,
        verify: bool = False,
        experts: Experts | None = None,
    ) -> None:
        self.config = cpu.config
        self.ctx_size, self.vocab_size = cpu.ctx_size, cpu.vocab_size
        if segment is None:
            residency = residency.without_segment()
            if experts is not None:
                experts.unstack()
        self.residency = residency
        self._cpu = cpu
        self._handle: Handle | None = handle
        self._seen: list[int] = []  # the sequence; the CPU's K/V follows with the next pass
        self._alone = False  # the CPU has been made ready to go on without the device
        self._passed = 0  # tokens that the experts' counts have not been looked at after
        self.experts = experts
        matrices = cpu.matrices()
        table = None
        self._profile: prof.Profile | None = None
        if prof.wanted():
            places = [linear.place for linear in matrices]
            routers = (len(residency.stacks), sum(self.config.layer_is_moe))
            table = Table(places, residency.places(), routers)
        self.device = Device(
            handle, residency, quant, min_flop=0.0, verify=verify, table=table, experts=experts
        )
        self.device.take_rows = lambda layer, rows: cpu.put_rows(layer, 0, rows)
        if segment is not None:
            self.device.read_rows = lambda at, position: stored_rows(at, segment, 0, position)
        by_place = {linear.place: linear for linear in matrices}
        if min_flop is None:
            cpu.leave(residency.worth(float("inf")))  # as it would compute what the gate left it
            min_flop = self._measured(residency, by_place)
        self.device.min_flop = min_flop
        worth = residency.worth(min_flop, self.config.num_experts_per_tok)
        cpu.leave(worth)  # what stays on the CPU for one token is worth a float32 copy there
        self._spared = frozenset() if verify else worth
        cpu.offload = self.device
        if table is not None:  # last: it prints at exit, whatever fails before
            title = self.config.model_type
            self._profile = prof.Profile(handle, title, lambda: table.render(title))

    # ---- Engine

    @property
    def name(self) -> str:
        return "offload" if self.device.failure is None else "cpu"

    @property
    def fallback(self) -> str | None:
        """Why the CPU has taken over."""
        return self.device.failure

    @property
    def handle(self) -> Handle | None:
        """The library's handle, for counters; None when it is given back."""
        return self._handle

    @property
    def position(self) -> int:
        return len(self._seen)

    def forward(self, ids: Sequence[int], *, all_logits: bool = False) -> F32:
        self._cpu.settle()  # experts go up from memory that a thread may be laying out
        if self.experts is not None and self.device.failure is None:
            passed, self._passed = self._passed, 0
            with suppress(SegmentLost):  # the device is: the sequence is computed anew below
                self.experts.after(passed, self.device)
        self._agree()
        try:
            logits = self._cpu.forward(ids, all_logits=all_logits)
        except SegmentLost:
            self._agree()
            logits = self._cpu.forward(ids, all_logits=all_logits)
        self._seen += [int(i) for i in ids]
        self._passed += len(ids)
        return logits

    def truncate(self, position: int) -> None:
        check_truncation(self, position)
        del self._seen[position:]

    def _agree(self) -> None:
        """The CPU's sequence is ``_seen``, whatever was truncated, lost or interrupted before; the
        device follows with its next layers."""
        if self.device.failure is not None and not self._alone:
            self._work_alone()
            self._alone = True
        if self.device.lost:
            self._cpu.truncate(0)
            self.device.lost = False
        self._cpu.truncate(min(self._cpu.position, len(self._seen)))
        if missing := self._seen[self._cpu.position :]:
            self._cpu.forward(missing)

    def _work_alone(self) -> None:
        """The device takes nothing any more: have what the CPU has where there is none, the float32
        copies if there is memory for them. What is not laid out now is when it is multiplied, which
        says so where there is no memory even for that."""
        self._cpu.leave(())
        try:
            self._cpu.lay_out()
            self._cpu.warm_up()
        except (OutOfMemory, MemoryError):
            self._cpu.leave({linear.place for linear in self.matrices()})

    def close(self) -> None:
        if self._profile is not None:
            self._profile.finish()
            self._profile = None
        handle, self._handle = self._handle, None
        self.experts = None
        self.device.close()
        self._cpu.close()
        if handle is not None:
            native.destroy(handle)
        self._seen = []

    def matrices(self) -> list[Linear]:
        """Every matrix of the CPU's engine."""
        return self._cpu.matrices()

    def lay_out(self) -> None:
        """Have the layout of what the CPU computes; the rest is laid out when it is needed."""
        self._cpu.lay_out(self._spared)

    def warm_up(self) -> None:
        """Expand what stays expanded, and let the device make what it makes at its first call."""
        self._cpu.warm_up()
        if self._handle is not None:
            self.device.warm_up(self.config.hidden_size)

    def stats(self) -> dict[str, int | bool]:
        """What `CpuEngine.stats` says, and what lies on the device and came of it."""
        d, experts = self.device, self.experts
        stacked = 0 if experts is None else 2 * len(experts.stacked)
        handle = None if d.failure is not None else self._handle  # a lost one cannot be asked
        return self._cpu.stats() | {
            "device_bytes": 0 if handle is None else native.cache_stats(handle).bytes,
            "device_weights": 0 if handle is None else d.weights + stacked,
            "device_wanted": self.residency.count,
            "segment_layers": len(d.segment),
            "min_flop": int(d.min_flop),
            "verified": d.checked,
            "verify_failures": d.failed,
            "evictions": 0 if experts is None else experts.evictions,
        }

    def _measured(self, residency: Residency, linears: Mapping[Place, Linear]) -> float:
        try:
            return measured_gate(self.device, residency, linears, self._cpu)
        except OutOfMemory:
            return float(MIN_FLOP)
        except NativeError as error:
            if error.status < abi.NOT_DONE:
                raise
            self.device.refuse(error)
            return float(MIN_FLOP)


def measured_gate(
    device: Device, residency: Residency, linears: Mapping[Place, Linear], cpu: CpuEngine
) -> float:
    """The operations below which a product of one row is done sooner on the CPU: a round trip's
    time, by the CPU's speed in the way that ``cpu`` takes. `MIN_FLOP` where nothing lies on the
    device."""
    if not residency.weights:
        return float(MIN_FLOP)
    small = min(residency.weights, key=lambda weight: weight.flop)
    large = max(
        (weight for weight in residency.weights if weight.place.kind != "head"),
        key=lambda weight: weight.flop,
        default=small,
    )
    trip = device.seconds(linears[small.place])
    linear = linears[large.place]
    seconds = cpu_seconds(linear, threads=cpu.threads, expanded=cpu.expands)
    return trip * large.flop / max(seconds, 1e-9)


def cpu_seconds(
    linear: Linear,
    rows: int = 1,
    repeats: int = 9,
    threads: int | None = None,
    *,
    expanded: bool = False,
) -> float:
    """Of a product with so many rows, from the codes or from a float32 copy through BLAS: the least
    of some. Threads of BLAS that meet on one core wait for the scheduler, 8 ms and often."""
    workers = Workers(threads)
    x = np.ones((rows, linear.k), np.float32)
    out = np.empty((rows, linear.n), np.float32)
    before, linear.expanded = linear.expanded, linear.expand(workers) if expanded else None
    times = []
    try:
        for _ in range(repeats):
            began = time.perf_counter()
            multiply(linear, x, out, workers)
            times.append(time.perf_counter() - began)
    finally:
        linear.expanded = before
        workers.close()
    return min(times)
