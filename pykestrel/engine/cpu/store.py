"""Where the matrices of the CPU engine lie: in memory as far as a budget goes, then in a file.

The file has no name and ends with the process. It is mapped, so the system reads of it what a
product needs and lets go of that when it needs the memory: slower, and right. A mapping keeps a
file descriptor, of which a process may have 1024, and a mixture of experts has more matrices: so
they share mappings.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import OutOfMemory
from ...files import cache_dir, reason
from ...quant import QTensor
from ...units import show_bytes
from ...weights import Matrix

_REGION: Final = 1 << 30  # bytes of a mapping; only what is taken of it has room on the disk
_SLAB: Final = 32 << 20  # bytes of memory that small matrices share
_LINE: Final = 64  # matrices begin at cache lines


class Store:
    """Room for matrices: ``budget`` bytes of memory (None: no limit), and a file in
    ``folder`` (None: the cache directory) for what is beyond. ``wanted``: bytes of all that will be
    taken."""

    def __init__(
        self, budget: int | None = None, folder: Path | None = None, wanted: int = 0
    ) -> None:
        self.budget = budget
        self.wanted = wanted
        self.memory = 0  # bytes in memory
        self.spilled = 0  # bytes in the file
        self._folder = folder
        self._tight = budget is not None and budget < wanted
        self._file: IO[bytes] | None = None  # of the region
        self._region = np.empty(0, np.uint8)
        self._used = 0  # bytes of it
        self._slab = np.empty(0, np.uint8)  # what is left of it
        self._lock = threading.Lock()  # several threads lay out experts

    @property
    def left(self) -> int | None:
        """Bytes of memory that the budget leaves; None: no limit."""
        return None if self.budget is None else max(0, self.budget - self.memory)

    def take(self, nbytes: int, *, seldom: bool = False) -> NDArray[np.uint8]:
        """``nbytes`` bytes, of any content. seldom: they will hardly be used, so under a budget the
        memory is left to others. Raises OutOfMemory where the file cannot be had."""
        last = seldom and self._tight
        with self._lock:
            if self.budget is None or (not last and self.memory + nbytes <= self.budget):
                self.memory += nbytes
                return self._from_memory(nbytes)
            buffer = self._from_file(nbytes)
            self.spilled += nbytes
            return buffer

    def hold(self, matrix: Matrix) -> Matrix:
        """The same matrix, here; few of its rows are read at a time."""
        if isinstance(matrix, QTensor):
            codes, scales = self._hold(matrix.codes), self._hold(matrix.scales)
            return QTensor(matrix.kind, matrix.shape, codes, scales)
        return self._hold(matrix)

    def _hold(self, array: NDArray[Any]) -> NDArray[Any]:
        if self.budget is None:
            self.memory += array.nbytes
            return array
        there = self.take(array.nbytes, seldom=True).view(array.dtype).reshape(array.shape)
        np.copyto(there, array)
        return there

    def _from_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Of a slab where it is little: NumPy asks for huge pages from 4 MB on, and memory of small
        pages takes longer to get than to fill."""
        if nbytes > _SLAB // 4:
            return np.empty(nbytes, np.uint8)
        if nbytes > len(self._slab):
            self._slab = np.empty(_SLAB, np.uint8)
        taken, self._slab = self._slab[:nbytes], self._slab[-(-nbytes // _LINE) * _LINE :]
        return taken

    def _from_file(self, nbytes: int) -> NDArray[np.uint8]:
        if not nbytes:
            return np.empty(0, np.uint8)
        try:
            folder = self._folder or cache_dir()
            if self._file is None or nbytes > len(self._region) - self._used:
                expected = self.wanted - self.memory - self.spilled
                self._map(folder, max(nbytes, min(_REGION, expected)))
            assert self._file is not None
            _allocate(self._file.fileno(), self._used, nbytes)
        except OSError as error:
            wanted = max(self.wanted, self.memory + self.spilled + nbytes)
            rest = show_bytes(wanted - min(wanted, self.budget or 0))
            raise OutOfMemory(
                f"--host-budget {self.budget} leaves {rest} of weights to a file in {folder}, "
                f"which cannot be made: {reason(error)}; have that much room there, name another "
                f"cache directory with PYKESTREL_CACHE, or take --host-budget {wanted}"
            ) from None
        begin = self._used
        self._used += -(-nbytes // _LINE) * _LINE
        return self._region[begin : begin + nbytes]

    def _map(self, folder: Path, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(prefix="weights-", dir=folder)  # noqa: SIM115
        weakref.finalize(self, file.close)
        file.truncate(size)
        region = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        if self._file is not None:
            self._file.close()  # what is mapped of it stays
        self._file, self._region, self._used = file, region, 0


def _allocate(file: int, offset: int, nbytes: int) -> None:
    """Room on the disk now, or an OSError: not a signal when a page is first written to."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, offset, nbytes)
        return
    os.lseek(file, offset, os.SEEK_SET)  # macOS, Windows
    zeros = bytes(min(nbytes, 1 << 20))
    while nbytes > 0:
        nbytes -= os.write(file, zeros[:nbytes])
