"""What `pykestrel bench` does to one model: run a test, time it, and say what it came to."""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine import Candidates, FillingEngine, Picked, Want
from ..errors import KestrelError

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..device import Running
    from ..engine import Answer
    from ..model import Model
    from ..native import Handle
    from ..session import Session
    from ..weights import Traffic

# Up to so many tokens before a test are computed, also where K/V can be made up: a short context
# is then a real one.
_COMPUTED = 64


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
    def start(self) -> int:
        """Positions before the first timed token."""
        return self.depth + (1 if self.kind == "tg" else 0)

    @property
    def positions(self) -> int:
        return self.start + self.n


@dataclass(frozen=True)
class Subject:
    """What is measured: a loaded model, or the shape of one with random weights."""

    name: str
    config: ModelConfig
    session: Session
    running: Running
    quant: str
    kv: str
    ctx_size: int
    traffic: Traffic
    parameters: int
    load_s: float
    threads: int | None = None
    synthetic: bool = False

    @classmethod
    def of(cls, model: Model) -> Subject:
        from ..loading import describe

        return cls(
            name=model.name,
            config=model.config,
            session=model.session,
            running=model.engine,
            quant=model.quant,
            kv=model.kv,
            ctx_size=model.ctx_size,
            traffic=model.traffic,
            parameters=describe(model.source).parameters,
            load_s=model.load_s,
            threads=model.threads,
        )

    @property
    def handle(self) -> Handle | None:
        """The GPU's handle; None on the CPU."""
        found: Handle | None = getattr(self.session.engine, "handle", None)
        return found

    def kv_bytes(self, positions: float) -> int:
        """What a token reads of the K/V of so many positions; a window leaves some out."""
        from ..engine.cpu.kv_cache import kv_bytes

        c = self.config
        layer = kv_bytes(c, 1, self.kv) / c.num_hidden_layers
        return round(sum(layer * min(positions, window or positions) for window in c.layer_window))


@dataclass(frozen=True)
class Measured:
    """The timed runs of one test."""

    seconds: list[float]
    logits_hash: str  # of the last token of the last run
    counts: dict[str, float]  # a token: launches and copies of a GPU


def measure(
    subject: Subject, test: Test, ids: list[int], runs: int, tick: Callable[[int], None]
) -> Measured:
    """Time the runs of a test. The first run is a warm-up and is not among them."""
    session, handle = subject.session, subject.handle
    if isinstance(session.engine, FillingEngine):
        session.rewind(0)  # whatever was measured before: the same test gives the same logits
    samples: list[float] = []
    digest, counts = "", {}
    for i in range(runs + 1):
        tick(i)
        _reach(session, test.start, ids)
        before_counts = _counters(handle)
        gc.collect()
        before = time.perf_counter()
        if test.kind == "pp":
            answer = _step(session, ids[test.start : test.start + test.n], subject)
        else:
            answer = _generate(session, ids[test.start], test.n, subject)
        samples.append(time.perf_counter() - before)
        if handle is not None and subject.handle is None:
            raise KestrelError(
                f"the GPU failed in the middle of {test.name}, which is not measured on the CPU "
                f"instead: {subject.session.engine.fallback}"  # type: ignore[attr-defined]
            )
        counts = {
            name: (value - before_counts[name]) / test.n
            for name, value in _counters(handle).items()
        }
        if i == runs:
            digest = _digest(session, answer)
        session.rewind(test.start)
    tick(runs + 1)
    return Measured(samples[1:], digest, counts)


def _reach(session: Session, position: int, ids: list[int]) -> None:
    """Be at ``position``, where the K/V of the tokens before it can be made up without it."""
    session.rewind(min(position, session.position))
    missing = position - session.position
    if missing > _COMPUTED and isinstance(session.engine, FillingEngine):
        session.fill(position)
    elif missing:
        session.extend(ids[session.position : position])


def _step(session: Session, ids: list[int], subject: Subject) -> Answer:
    return session.extend(ids, want=Want(subject.config.vocab_size))


def _generate(session: Session, token: int, n: int, subject: Subject) -> Answer:
    """``n`` tokens as a greedy generation has them: each is fed back."""
    answer = _step(session, [token], subject)
    for _ in range(n - 1):
        answer = _step(session, [_best(answer)], subject)
    return answer


def _best(answer: Answer) -> int:
    if isinstance(answer, Candidates):
        return int(answer.ids[0])
    return answer.id if isinstance(answer, Picked) else int(answer.argmax())


def _digest(session: Session, answer: Answer) -> str:
    logits = answer if isinstance(answer, np.ndarray) else session.last_logits()
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16]


def _counters(handle: Handle | None) -> dict[str, int]:
    if handle is None:
        return {}
    from .. import native

    prof = native.prof_read(handle)
    names = ("launches", "h2d_copies", "d2h_copies", "h2d_bytes", "d2h_bytes")
    return {name: getattr(prof, name) for name in names}


def summary(
    subject: Subject, test: Test, measured: Measured, bandwidth: float | None
) -> dict[str, Any]:
    """Speed of one test: mean and standard deviation over the runs; bytes are a token's.

    bandwidth: bytes a second that this GPU reads at best; None on the CPU.
    """
    samples = measured.seconds
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
        "logits_hash": measured.logits_hash,
    }
    if measured.counts:
        result["per_token"] = measured.counts
    if test.kind == "tg":
        weights = subject.traffic.token
        kv = subject.kv_bytes(test.depth + test.n / 2)  # halfway through the test
        result["weight_bytes_per_token"] = weights
        result["kv_bytes_per_token"] = kv
        result["gb_per_second"] = (weights + kv) * result["tokens_per_second"] / 1e9
        if bandwidth:
            result["percent_of_bandwidth"] = 1e11 * result["gb_per_second"] / bandwidth
    return result


def facts(subject: Subject, bandwidth: float | None) -> dict[str, Any]:
    """What was measured, on what."""
    from .. import __version__, machine

    numpy = machine.numpy_blas()
    blas = numpy["blas"]
    result: dict[str, Any] = {
        "pykestrel": __version__,
        "model": subject.name,
        "synthetic": subject.synthetic,
        "parameters": subject.parameters,
        "weight_bytes": subject.traffic.weights,
        "backend": subject.running.name,
        "threads": subject.threads or blas.get("threads") or machine.cores(),
        "processor": machine.cpuinfo().get("model name", "unknown"),
        "numpy": numpy["version"],
        "blas": blas,
        "blas_note": numpy["note"],
        "quant": subject.quant,
        "kv": subject.kv,
        "ctx_size": subject.ctx_size,
        "load_seconds": subject.load_s,
    }
    if subject.handle is not None:
        result["gpu"] = gpu_facts(subject.running.gpu, bandwidth)
    return result


def gpu_facts(index: int, bandwidth: float | None) -> dict[str, Any]:
    """The GPU, its driver and clocks, and how fast it reads at best."""
    from .. import machine, native

    info = native.dev_query(index)
    return {
        "name": info.name,
        "driver": machine.nvidia_driver(),
        "driver_cuda": f"{info.driver_version // 1000}.{info.driver_version % 1000 // 10}",
        "sm_clock_mhz": round(info.sm_clock_khz / 1000),
        "memory_clock_mhz": round(info.memory_clock_khz / 1000),
        "read_bytes_per_second": bandwidth,
        "peak_bytes_per_second": info.peak_bytes_per_second or None,
    }


def read_bandwidth(subject: Subject) -> float | None:
    """Bytes a second that the GPU reads at best; None on the CPU, and where it has no room left."""
    if subject.handle is None:
        return None
    from .. import native

    for size in (8 << 30, 1 << 30):  # a launch over 1 GB is 7 % slower: it ends before it is even
        try:
            return native.dev_bandwidth(subject.handle, size)
        except native.NativeError as error:
            if error.status < native.abi.NOT_DONE:
                raise
    return None
