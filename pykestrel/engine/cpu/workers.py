"""Threads for the parts of a forward pass that are not BLAS.

NumPy lets go of the GIL inside its loops, so Python threads run them side by side as long as one
call does enough work. OpenBLAS has threads of its own; these are for expanding and multiplying
quantised blocks, which BLAS cannot read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...machine import cores

F32: TypeAlias = NDArray[np.float32]


class Scratch:
    """Named float32 buffers that grow and are never given back; one for each thread."""

    def __init__(self) -> None:
        self._buffers: dict[str, F32] = {}

    def get(self, name: str, *shape: int) -> F32:
        """An uninitialised contiguous array; valid until the same name is asked for again."""
        size = 1
        for extent in shape:
            size *= extent
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer[:size].reshape(shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class _Job:
    """Items to work through; whoever is free takes the next one."""

    def __init__(self, work: Callable[[Any, Scratch], None], items: Sequence[Any]) -> None:
        self.work = work
        self.items = iter(items)  # next() on a list's iterator is atomic under the GIL
        self.lock = threading.Lock()
        self.active = 0
        self.closed = False  # nobody may join any more
        self.stopped = False  # nobody may take another item
        self.idle = threading.Lock()  # free once the job is closed and nobody is at work
        self.idle.acquire()
        self.error: BaseException | None = None

    def run(self, scratch: Scratch) -> None:
        for item in self.items:
            if self.stopped:
                return
            self.work(item, scratch)

    def help(self, scratch: Scratch) -> None:
        with self.lock:
            if self.closed:  # all done before this thread had woken up
                return
            self.active += 1
        try:
            with np.errstate(all="ignore"):
                self.run(scratch)
        except BaseException as error:
            self.error = error
        self._leave()

    def _leave(self) -> None:
        with self.lock:
            self.active -= 1
            if self.closed and not self.active:
                self.idle.release()

    def close(self) -> bool:
        """No more helpers may join; True when none is at work."""
        with self.lock:
            self.closed = True
            return not self.active


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    scratch = Scratch()
    while (job := jobs.get()) is not None:
        job.help(scratch)
        del job


class Workers:
    """``count`` threads in all, the caller's among them; the others start at the first job."""

    def __init__(self, count: int | None = None) -> None:
        self.count = cores() if count is None else max(1, count)
        self.scratch = Scratch()  # the caller's
        self._queues: list[queue.SimpleQueue[_Job | None]] = []
        self._job: _Job | None = None

    def run(
        self,
        work: Callable[[Any, Scratch], None],
        items: Sequence[Any],
        threads: int | None = None,
    ) -> None:
        """``work(item, scratch)`` for every item, in no particular order; returns when all are
        done. Each item must have outputs of its own. threads: no more than so many work, this
        one among them; None: all. Threads pass the GIL around, so too many for little work take
        longer than few."""
        self.settle()
        most = min(self.count, len(items), max(1, self.count if threads is None else threads))
        if most < 2:
            for item in items:
                work(item, self.scratch)
            return
        if not self._queues:
            self._start()
        job = self._job = _Job(work, items)
        for jobs in self._queues[: most - 1]:
            jobs.put(job)
        try:
            job.run(self.scratch)
        except BaseException:
            job.stopped = True
            raise
        finally:
            self.settle()

    def settle(self) -> None:
        """Wait until no thread works any more: after an interrupt one may still be writing."""
        job = self._job
        if job is None:
            return
        if not job.close():
            with job.idle:
                pass
        self._job = None
        if job.error is not None:
            raise job.error

    def _start(self) -> None:
        for i in range(1, self.count):
            jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            # Daemons that hold nothing but their queue: neither a forgotten close() nor the end
            # of the interpreter waits for them.
            threading.Thread(
                target=_serve, args=(jobs,), name=f"pykestrel-cpu-{i}", daemon=True
            ).start()
            self._queues.append(jobs)

    def close(self) -> None:
        for jobs in self._queues:
            jobs.put(None)
        self._queues.clear()

    def __del__(self) -> None:
        self.close()


INLINE: Final = Workers(1)  # without a thread of its own, so any may use it
