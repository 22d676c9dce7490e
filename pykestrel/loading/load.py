"""Files to `ModelWeights`: tensor by tensor, tile by tile, on a few threads.

At no time is there a float32 copy of a big tensor; at most one tile a thread. Nothing is
allocated before `make_plan` has found every tensor in the files with the shape it must have, so
what is allocated is bounded by the size of the files.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..config import ModelConfig
from ..errors import ModelError, OutOfMemory, UsageError
from ..machine import memory
from ..meter import LoadMeter
from ..quant import GROUP, QTensor, n_groups, quantize, quantize_bf16, quantized_bytes
from ..weights import F32, LayerWeights, Matrix, ModelWeights
from .families import Piece, Plan, Target, make_plan
from .source import Source
from .tensors import TensorInfo, TensorTable, read_bf16, read_f32, tiles

Progress: TypeAlias = Callable[[str, int, int], None]  # tensor name, bytes done, bytes in all

QUANTS = ("bf16", "q8", "q4")
TILE = 8 << 20  # bytes of float32 in one tile
_ROUND_TILE = 2 << 20  # the same where it is rounded to bf16: the temporaries stay in the cache
_WORKERS = 4  # the quantiser is parallel itself: these overlap reading, decoding and quantising


def read_config(source: Source) -> ModelConfig:
    """The checked configuration of a model."""
    if source.kind == "gguf":
        return source.gguf().config
    path = source.path / "config.json"
    config = source.read_json("config.json")
    if config is None:
        raise ModelError(f"{path} is missing; name the directory that holds the model's files")
    return ModelConfig.from_dict(config, str(path))


def read_tensors(source: Source) -> TensorTable:
    """Every tensor of the files, by name, each checked against its file."""
    if source.kind == "gguf":
        return source.gguf().tensors
    from .safetensors_file import read_directory

    return read_directory(source.path)[0]


@dataclass(frozen=True)
class Jobs:
    """What there is to load, and how one weight of it is."""

    config: ModelConfig
    quant: str
    plan: Plan
    work: Callable[[Target, Report], Any]
    nbytes: Callable[[Target], int]  # to read of a target
    total: int  # bytes to read
    fixed: bool = False  # a quantised directory: there is no other kind


def weight_jobs(source: Source, quant: str | None) -> Jobs:
    """The weights of a model. Raises ModelError for whatever is wrong with the files, UsageError
    for an unknown ``quant``."""
    from .quantized import check_stored, quantized_jobs, stored_quant

    check_quant(quant)
    config = read_config(source)
    stored = stored_quant(source)
    check_stored(source, stored, quant)
    if stored is not None:
        return quantized_jobs(source, config, stored)
    plan = make_plan(config, read_tensors(source), source.path, gguf=source.kind == "gguf")
    kind = quant or "q8"
    return Jobs(
        config,
        kind,
        plan,
        lambda target, report: fill(target, kind, report),
        lambda target: target.nbytes,
        plan.nbytes,
    )


def load_weights(
    source: Source,
    quant: str | None = None,
    progress: Progress | None = None,
    meter: LoadMeter | None = None,
) -> ModelWeights:
    """All weights of a model, as bf16 or quantised.

    ``quant`` None: what a directory of `save_quantized` holds, else "q8". ``progress(tensor name,
    bytes done, bytes in all)`` is called from this thread; ``meter`` counts. Raises ModelError for
    whatever is wrong with the files, OutOfMemory, UsageError for an unknown ``quant``.
    """
    jobs = weight_jobs(source, quant)
    check_memory(source, jobs.plan, jobs.quant, () if jobs.fixed else QUANTS)
    needed = weight_bytes(jobs.plan, jobs.quant)
    values = run_jobs(jobs.plan.targets, jobs.work, jobs.total, progress, needed, meter)
    return assemble(jobs.config, jobs.quant, jobs.plan, values)


def load_as_needed(
    source: Source,
    quant: str | None = None,
    progress: Progress | None = None,
    meter: LoadMeter | None = None,
) -> ModelWeights:
    """The same, but a layer is read when it is taken from ``layers``, first to last: at no time is
    more than one layer in memory that its taker has not laid out."""
    jobs = weight_jobs(source, quant)
    meter = meter or LoadMeter()
    reader = _LayerReader(jobs, progress, meter)
    top = {
        target.field: value
        for target, value in zip(reader.top, reader.read(reader.top), strict=True)
    }
    return ModelWeights(
        config=jobs.config,
        quant=jobs.quant,
        embed=top["embed"],
        layers=reader,
        final_norm=top["final_norm"],
        head=top.get("head"),
    )


class _LayerReader:
    """`weights.Layers` out of files."""

    def __init__(self, jobs: Jobs, progress: Progress | None, meter: LoadMeter) -> None:
        self._jobs = jobs
        self._progress = progress
        self._meter = meter
        self._done = 0  # bytes of the calls before
        self.top = [target for target in jobs.plan.targets if target.layer is None]
        self._layers: list[list[Target]] = [[] for _ in range(jobs.config.num_hidden_layers)]
        for target in jobs.plan.targets:
            if target.layer is not None:
                self._layers[target.layer].append(target)

    def pop(self, index: int, /) -> LayerWeights:
        targets = self._layers.pop(index)
        values = self.read(targets)
        return LayerWeights(
            **{target.field: value for target, value in zip(targets, values, strict=True)}
        )

    def read(self, targets: list[Target]) -> list[Any]:
        before, progress = self._done, self._progress

        def report(name: str, done: int, _: int) -> None:
            if progress is not None:
                progress(name, before + done, self._jobs.total)

        needed = sum(target_bytes(target, self._jobs.quant) for target in targets)
        values = run_jobs(targets, self._jobs.work, self._jobs.total, report, needed, self._meter)
        self._done += sum(map(self._jobs.nbytes, targets))
        self._meter.wanted = len(self._jobs.plan.targets)
        self._meter.bytes = self._done
        return values


def load_vectors(source: Source, quant: str | None = None) -> tuple[F32, list[dict[str, F32]]]:
    """The final norm, and the norms and biases of every layer by their names in `LayerWeights`."""
    jobs = weight_jobs(source, quant)
    layers: list[dict[str, F32]] = [{} for _ in range(jobs.config.num_hidden_layers)]
    top: dict[str, F32] = {}
    for target in jobs.plan.targets:
        if not target.is_matrix and target.field != "router":
            where = top if target.layer is None else layers[target.layer]
            where[target.field] = read_vector(target, lambda nbytes: None)
    return top["final_norm"], layers


def check_memory(source: Source, plan: Plan, quant: str, others: Sequence[str] = ()) -> None:
    """Refuse before the work what cannot fit: the kernel would kill the process in the middle.

    ``others`` are the kinds that could be taken instead.
    """
    available = memory()["available"]
    needed = weight_bytes(plan, quant)
    if available is None or needed <= available:
        return
    smaller = [q for q in others if weight_bytes(plan, q) <= available]
    hint = "close other programs or take a smaller model"
    if smaller:
        hint = f"{smaller[0]} needs {weight_bytes(plan, smaller[0]) / 1e9:.2f} GB"
    raise OutOfMemory(
        f"the weights of {source.name} as {quant} need {needed / 1e9:.2f} GB and "
        f"{available / 1e9:.2f} GB are free; {hint}"
    )


def check_quant(quant: str | None) -> None:
    if quant is not None and quant not in QUANTS:
        raise UsageError(f"quant is {quant!r}; one of {', '.join(QUANTS)} was wanted")


def weight_bytes(plan: Plan, quant: str) -> int:
    """Bytes that the weights of ``plan`` take in memory (and in a file of `save_quantized`)."""
    return sum(target_bytes(t, quant) for t in plan.targets)


def target_bytes(target: Target, quant: str) -> int:
    if target.is_matrix:
        return quantized_bytes(target.shape, quant)
    return 4 * int(np.prod(target.shape, dtype=np.int64))


def assemble(config: ModelConfig, quant: str, plan: Plan, values: list[Any]) -> ModelWeights:
    """ModelWeights from one value a target, in the order of the plan."""
    top: dict[str, Any] = {}
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_hidden_layers)]
    for target, value in zip(plan.targets, values, strict=True):
        where = top if target.layer is None else layers[target.layer]
        where[target.field] = value
    return ModelWeights(
        config=config,
        quant=quant,
        embed=top["embed"],
        layers=[LayerWeights(**fields) for fields in layers],
        final_norm=top["final_norm"],
        head=top.get("head"),
    )


# ----- one weight --------------------------------------------------------------------------------

Report: TypeAlias = Callable[[int], None]  # bytes read; raises when the work is to stop


def fill(target: Target, quant: str, report: Report) -> Matrix | F32:
    """Read, convert and if wanted quantise one weight; ``report`` is called after every tile."""
    if not target.is_matrix:
        return read_vector(target, report)
    shape = target.shape
    k, lead = shape[-1], shape[:-1]
    if quant == "bf16":
        bits = np.empty(shape, np.uint16)
        rows = bits.reshape(-1, k)
        for lo, part in blocks(target, read_bf16, report):
            rows[lo : lo + len(part)] = part
        return bits
    width, dtype = (GROUP, np.int8) if quant == "q8" else (GROUP // 2, np.uint8)
    groups = n_groups(k)
    codes = np.empty((*lead, groups * width), dtype)
    scales = np.empty((*lead, groups), np.float16)
    flat_codes, flat_scales = codes.reshape(-1, groups * width), scales.reshape(-1, groups)
    for lo, q in quantized_blocks(target, quant, report):
        flat_codes[lo : lo + len(q.codes)] = q.codes
        flat_scales[lo : lo + len(q.codes)] = q.scales
    return QTensor(quant, shape, codes, scales)


def quantized_blocks(target: Target, quant: str, report: Report) -> Iterator[tuple[int, QTensor]]:
    """(first row, quantised rows) of a matrix or stack, in the order of its rows."""
    as_bits = in_bf16(target)
    for lo, part in blocks(target, read_bf16 if as_bits else read_f32, report):
        try:
            yield lo, quantize_bf16(part, quant) if as_bits else quantize(part, quant)
        except ValueError as error:
            path = target.pieces[0].info.path
            raise ModelError(f"{path}: {target.name}: {error}; load it as bf16") from None


def read_vector(target: Target, report: Report) -> F32:
    """A norm, bias or router: float32, never quantised."""
    piece = target.pieces[0]
    values = read_f32(piece.info, 0, piece.info.rows)
    report(piece.info.nbytes)
    if piece.order is not None:  # a bias is one row of the file
        values = values.reshape(-1)[piece.order]
    return np.ascontiguousarray(values.reshape(target.shape))


def in_bf16(target: Target) -> bool:
    """Whether the file holds bf16: such weights are quantised from their bits, which is half the
    bytes to move for the same result."""
    return all(p.info.dtype == "BF16" and p.info.decode is None for p in target.pieces)


Reader: TypeAlias = Callable[[TensorInfo, int, int], Any]  # rows of a tensor: read_bf16, ...


def blocks(
    target: Target, read: Reader, report: Report, tile: int = TILE
) -> Iterator[tuple[int, Any]]:
    """(first row, rows [n, K]) of a matrix or stack, as ``read`` gives them: at most ``tile`` bytes
    of float32 at a time."""
    k = target.shape[-1]
    n = target.shape[-2]
    rounded = read is read_bf16 and not in_bf16(target)
    for e, piece in enumerate(target.pieces):
        for lo, part in _piece_blocks(piece, k, read, report, _ROUND_TILE if rounded else tile):
            yield e * n + lo, part


def _piece_blocks(
    piece: Piece, k: int, read: Reader, report: Report, tile: int
) -> Iterator[tuple[int, Any]]:
    row_bytes = piece.info.nbytes // max(1, piece.info.rows)
    if piece.columns is not None or piece.order is not None:
        # one expert, or the q or k of one layer: small enough to be turned as a whole
        part: Any = read(piece.info, piece.row, piece.row + piece.rows)
        report(piece.rows * row_bytes)
        if piece.columns is not None:
            part = part[:, piece.columns[0] : piece.columns[1]].T
        if piece.order is not None:
            part = part[piece.order]
        yield 0, np.ascontiguousarray(part)
        return
    for lo, hi in tiles(piece.rows, 4 * k, tile):
        part = read(piece.info, piece.row + lo, piece.row + hi)
        report((hi - lo) * row_bytes)
        yield lo, part


# ----- all weights -------------------------------------------------------------------------------


class _Stopped(Exception):
    """Ends a worker between two tiles, after an error or Ctrl+C elsewhere."""


def run_jobs(
    targets: list[Target],
    work: Callable[[Target, Report], Any],
    total: int,
    progress: Progress | None,
    needed: int,
    meter: LoadMeter | None = None,
    workers: int = _WORKERS,
) -> list[Any]:
    """``work`` for every target on at most ``workers`` threads; results in order.

    ``total`` bytes will be reported; ``needed`` is what the results take, for the message when
    memory runs out. On an error or Ctrl+C the workers end at their next tile, and this function
    after them, however often Ctrl+C comes: what ``work`` uses may be freed then.
    """
    meter = meter or LoadMeter()
    meter.wanted = len(targets)
    meter.threads = min(workers, os.cpu_count() or 1)
    stopped = False
    working = 0
    count = threading.Lock()  # of `working`; the workers' own: Ctrl+C cannot leave it held
    events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def job(target: Target) -> Any:
        def report(nbytes: int) -> None:
            if stopped:
                raise _Stopped
            events.put((target.name, nbytes))

        nonlocal working
        with count:
            working += 1  # first: nobody who has seen `stopped` and no worker meets one later
        try:
            if stopped:
                raise _Stopped
            with meter.job():
                return work(target, report)
        finally:
            with count:
                working -= 1

    # the biggest first, so that none of them is left to one thread at the end
    order = sorted(range(len(targets)), key=lambda i: -targets[i].nbytes)
    pool = ThreadPoolExecutor(meter.threads, "pykestrel-load")
    futures: dict[int, Future[Any]] = {}
    done_bytes = 0
    try:
        for i in order:
            futures[i] = pool.submit(job, targets[i])
        pending = set(futures.values())
        while pending:
            finished, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
            while not events.empty():
                name, nbytes = events.get()
                done_bytes += nbytes
                meter.bytes = done_bytes
                if progress is not None:
                    progress(name, done_bytes, total)
            for future in finished:
                future.result()
        return [futures[i].result() for i in range(len(targets))]
    except MemoryError:
        raise OutOfMemory(
            f"memory ran out while the weights were loaded: they need {needed / 1e9:.2f} GB; "
            "close other programs, or take q4 or a smaller model"
        ) from None
    finally:
        stopped = True
        pool.shutdown(wait=False, cancel_futures=True)
        # The pool's own wait ends with another Ctrl+C, and misses a thread that one saw starting.
        while working:
            with suppress(KeyboardInterrupt):
                time.sleep(0.001)
