"""What loading a model did, and where its time went: a `LoadMeter` grows while the work goes on.

Several threads load at once, so the seconds of the stages are *busy seconds*: those of all threads
added up. They overlap, and their sum may be more than the wall time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


class _Clock(threading.local):
    """Busy seconds of this thread since it began."""

    read = 0.0
    upload = 0.0


_clock = _Clock()


@contextmanager
def reading() -> Iterator[None]:
    """The body gets bytes of a file."""
    before = time.perf_counter()
    try:
        yield
    finally:
        _clock.read += time.perf_counter() - before


@contextmanager
def uploading() -> Iterator[None]:
    """The body hands bytes to a device, or waits for its turn to."""
    before = time.perf_counter()
    try:
        yield
    finally:
        _clock.upload += time.perf_counter() - before


@dataclass(frozen=True)
class Resident:
    """What a device holds of a model after it was loaded."""

    # Entries of the device's weight cache; q, k and v of a layer share one. Of a part of a model:
    # its matrices, of an expert two, also where all experts of a layer share an entry.
    entries: int
    wanted: int  # of the whole model
    bytes: int  # of device memory, padding included
    evictions: int
    whole: int = 0  # device bytes of all weights, where --vram-budget allows less

    @property
    def complete(self) -> bool:
        return self.entries >= self.wanted and not self.evictions


@dataclass
class LoadMeter:
    """Pass one to `load` to watch it; `Model.loaded` is the one that was used."""

    weights: int = 0  # tensors of the model that are where they belong
    wanted: int = 0  # tensors of the model
    bytes: int = 0  # read from the files
    wall_s: float = 0.0  # from the first weight to the last
    read_s: float = 0.0  # busy: files to memory
    convert_s: float = 0.0  # busy: decoding, checking, quantising on the host
    upload_s: float = 0.0  # busy: to the device, which quantises behind the copies
    waiting_s: float = 0.0  # threads that waited for another one's upload
    reserve_s: float = 0.0  # of the wall time: taking the device's memory, before the first weight
    finish_s: float = 0.0  # of the wall time: waiting for the device, after the last
    threads: int = 0
    resident: Resident | None = None  # on a device
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def reset(self) -> None:
        """Begin anew, for a model that is loaded once more, elsewhere."""
        for name, value in vars(LoadMeter()).items():
            if name != "_lock":
                setattr(self, name, value)

    @contextmanager
    def job(self) -> Iterator[None]:
        """One weight, in a thread of its own. What is neither reading nor upload is conversion."""
        before, read, upload = time.perf_counter(), _clock.read, _clock.upload
        try:
            yield
        finally:
            busy = time.perf_counter() - before
            read, upload = _clock.read - read, _clock.upload - upload
            with self._lock:
                self.read_s += read
                self.upload_s += upload
                self.convert_s += max(0.0, busy - read - upload)
        with self._lock:
            self.weights += 1

    @contextmanager
    def wall(self) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self.wall_s += time.perf_counter() - before

    def in_uploads(self, seconds: float) -> None:
        """The device's side says how long uploads took; the rest of the calls was waiting."""
        self.waiting_s = max(0.0, self.upload_s - seconds)
        self.upload_s = seconds

    def facts(self) -> dict[str, Any]:
        """As JSON data."""
        names = ["weights", "wanted", "bytes", "wall_s", "read_s", "convert_s", "upload_s"]
        names += ["waiting_s", "threads"]
        r = self.resident
        if r is not None:
            names += ["reserve_s", "finish_s"]
        result = {name: getattr(self, name) for name in names}
        if r is not None:
            result["device"] = {
                "entries": r.entries,
                "wanted": r.wanted,
                "bytes": r.bytes,
                "evictions": r.evictions,
            }
        return result
