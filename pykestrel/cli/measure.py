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

from ..engine import Candidates, FillingEngine, Picked, PickingEngine, Want
from ..errors import KestrelError

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..device import Running
    from ..engine import Answer
    from ..meter import LoadMeter
    from ..model import Model
    from ..native import DeviceInfo, Handle
    from ..session import Session
    from ..weights import Traffic

# Up to so many tokens before a test are computed, also where K/V can be made up: a short context
# is then a real one.
_COMPUTED = 64


@dataclass(frozen=True)
class Test:
    """One row: ``kind`` "pp", "tg" or "ttft" (a prompt and its first token), ``n`` tokens, after
    ``depth`` tokens of context."""

    kind: str
    n: int
    depth: int

    @property
    def name(self) -> str:
        n = str(self.n)
        if self.kind == "ttft" and self.n % 1024 == 0:
            n = f"{self.n // 1024}k"
        return f"{self.kind}{n}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def start(self) -> int:
        """Positions before the first timed token."""
        return self.depth + (1 if self.kind == "tg" else 0)

    @property
    def positions(self) -> int:
        return self.start + self.n + (1 if self.kind == "ttft" else 0)


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
    loaded: LoadMeter
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
            loaded=model.loaded,
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
    logits_hash: str  # of the last token of the last run; "" where nobody has its logits
    counts: dict[str, float]  # a token: launches and copies of a GPU
    builds: int = 0  # weights that were uploaded or expanded while it was timed


def measure(
    subject: Subject, test: Test, ids: list[int], runs: int, tick: Callable[[int], None]
) -> Measured:
    """Time the runs of a test. The first run is a warm-up and is not among them."""
    session, handle = subject.session, subject.handle
    if isinstance(session.engine, FillingEngine):
        session.rewind(0)  # whatever was measured before: the same test gives the same logits
    samples: list[float] = []
    digest, counts, builds = "", {}, 0
    answer: Answer | None
    for i in range(runs + 1):
        tick(i)
        _reach(session, test.start, ids)
        built = _builds(session, handle)
        before_counts = _counters(handle)
        gc.collect()
        before = time.perf_counter()
        if test.kind == "ttft":
            answer = None  # the sampler has it
            _first_token(session, ids[: test.n], test.positions)
        elif test.kind == "pp":
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
        if i > 0:
            builds += _builds(session, handle) - built
        if i == runs:
            digest = _digest(session, answer)
        session.rewind(test.start)
    tick(runs + 1)
    return Measured(samples[1:], digest, counts, builds)


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


def _first_token(session: Session, ids: list[int], limit: int) -> None:
    """What a call with this prompt does up to its first token, from an empty context."""
    from ..generate import TextPlan, Timings, make_job
    from ..generate import run as generation
    from ..sampling import SamplingParams

    job = make_job(
        session.engine,
        ids,
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        limit=limit,
        plan=TextPlan(None),
        eos_ids=frozenset(),
        reuse=False,
        timings=Timings(),
        started=time.perf_counter(),
    )
    for _ in generation(session, job, lambda: None):
        pass


def _builds(session: Session, handle: Handle | None) -> int:
    """How many weights have been put where they are fast, so far."""
    if handle is not None:
        from .. import native

        return native.cache_stats(handle).uploads
    stats: dict[str, int] = getattr(session.engine, "stats", dict)()
    return int(stats.get("expansions", 0))


def _best(answer: Answer) -> int:
    if isinstance(answer, Candidates):
        return int(answer.ids[0])
    return answer.id if isinstance(answer, Picked) else int(answer.argmax())


def _digest(session: Session, answer: Answer | None) -> str:
    if answer is None and not isinstance(session.engine, PickingEngine):
        return ""
    logits = answer if isinstance(answer, np.ndarray) else session.last_logits()
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16]


def _counters(handle: Handle | None) -> dict[str, int]:
    if handle is None:
        return {}
    from .. import native

    prof = native.prof_read(handle)
    names = ("launches", "h2d_copies", "d2h_copies", "h2d_bytes", "d2h_bytes")
    return {name: getattr(prof, name) for name in names}


# Dense bfloat16 operations (a multiplication and an addition are two), with float32 sums, that one
# multiprocessor does a clock, by compute capability; from NVIDIA's architecture white papers.
# 8.6, 8.9 and 12.0 are missing: their GeForce boards do half of what the others do.
_MATRIX_OPS = {80: 2048, 90: 4096, 100: 8192}


def matrix_peak_of(info: DeviceInfo) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU at its highest clock; None for one that is not known."""
    ops = _MATRIX_OPS.get(10 * info.cc_major + info.cc_minor)
    return None if ops is None else float(ops) * info.sm_count * info.sm_clock_khz * 1000


def prompt_flops(config: ModelConfig, n: int, depth: int) -> int:
    """Floating-point operations that ``n`` tokens of a prompt need after ``depth`` others:
    the products with all weights they meet, the head for one of them, and causal attention."""
    c, h = config, config.hidden_size
    weights = attention = 0
    for moe, window in zip(c.layer_is_moe, c.layer_window, strict=True):
        weights += h * (2 * c.q_dim + 2 * c.kv_dim)
        f = c.num_experts_per_tok * c.moe_intermediate_size if moe else c.intermediate_size
        weights += 3 * h * f + (c.num_experts * h if moe else 0)
        full = n if window is None else min(max(window - depth, 0), n)  # tokens that see all
        seen = full * depth + full * (full + 1) // 2 + (n - full) * (window or 0)
        attention += 4 * c.q_dim * seen
    return 2 * n * weights + attention + 2 * h * c.vocab_size


def summary(
    subject: Subject,
    test: Test,
    measured: Measured,
    bandwidth: float | None,
    matrix_peak: float | None = None,
) -> dict[str, Any]:
    """Speed of one test: mean and standard deviation over the runs; bytes are a token's.

    bandwidth: bytes a second that this GPU reads at best, matrix_peak: `matrix_peak_of` it; None on
    the CPU.
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
        "built_in_window": measured.builds,
    }
    if measured.logits_hash:
        result["logits_hash"] = measured.logits_hash
    if test.kind == "ttft":
        ms = [1000 * seconds for seconds in samples]
        result["ttft_ms"] = statistics.fmean(ms)
        result["ttft_spread_ms"] = statistics.stdev(ms) if len(ms) > 1 else 0.0
    if measured.counts:
        result["per_token"] = measured.counts
    if test.kind == "pp" and subject.handle is not None:
        flops = prompt_flops(subject.config, test.n, test.depth)
        result["flops"] = flops
        result["tflop_per_second"] = flops * result["tokens_per_second"] / test.n / 1e12
        if matrix_peak:
            result["percent_of_matrix_peak"] = 1e14 * result["tflop_per_second"] / matrix_peak
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
        "running": subject.running.why,
        "threads": subject.threads or blas.get("threads") or machine.cores(),
        "processor": machine.cpuinfo().get("model name", "unknown"),
        "numpy": numpy["version"],
        "blas": blas,
        "blas_note": numpy["note"],
        "quant": subject.quant,
        "kv": subject.kv,
        "ctx_size": subject.ctx_size,
        "load_seconds": subject.load_s,
        "load": subject.loaded.facts(),
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
        "peak_matrix_flops": matrix_peak_of(info),
    }


def read_bandwidth(subject: Subject) -> float | None:
    """Bytes a second that the GPU reads at best; None on the CPU, where the GPU has a part of the
    model (that rate bounds nothing then), and where it has no room left."""
    if subject.handle is None or subject.running.name != "cuda":
        return None
    from .. import native

    for size in (8 << 30, 1 << 30):  # a launch over 1 GB is 7 % slower: it ends before it is even
        try:
            return native.dev_bandwidth(subject.handle, size)
        except native.NativeError as error:
            if error.status < native.abi.NOT_DONE:
                raise
    return None
