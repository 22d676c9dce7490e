"""What tests tell the emulated CUDA runtime: native/tests/emu/fake.h from Python."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from pathlib import Path

# Errors, as CUDA numbers them.
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_KERNEL_IMAGE = 209
ILLEGAL_ADDRESS = 700  # loses the device
BAD_ALLOC = -1  # the call throws std::bad_alloc


class Kind(IntEnum):
    """Kinds of runtime calls."""

    ANY = 0
    MALLOC = 1
    MEMCPY = 2
    LAUNCH = 3
    SYNC = 4
    GRAPH = 5
    FUNCTION = 6
    OTHER = 7


class Counter(IntEnum):
    """What `FakeCuda.count` counts."""

    KERNELS = 0
    GRAPHS = 1
    H2D = 2
    H2D_BYTES = 3
    D2H = 4
    D2H_BYTES = 5
    D2D = 6
    FRESH = 7  # words that came to the host and that nobody had written


class FakeCuda:
    """The controls of one emulated library, which is also what pykestrel.native has loaded."""

    def __init__(self, library: Path) -> None:
        c = ctypes.CDLL(str(library))
        for name in ("calls", "live", "count", "faults_left"):
            getattr(c, f"fake_{name}").restype = ctypes.c_int64
        c.fake_memory_used.restype = ctypes.c_uint64
        c.fake_set_memory.argtypes = [ctypes.c_uint64]
        c.fake_schedule.argtypes = [ctypes.c_uint32]
        c.fake_fail_at.argtypes = [ctypes.c_int64, ctypes.c_int]
        c.fake_fail_kind.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
        c.fake_fail_async.argtypes = [ctypes.c_int64, ctypes.c_int]
        self._c = c

    def reset(self) -> None:
        """Everything to its default, counters to 0. What is allocated stays."""
        self._c.fake_reset()

    def fail_at(self, n: int, error: int = INVALID_VALUE, kind: Kind = Kind.ANY) -> None:
        """The n-th call (of a kind) from now answers ``error``; 0: none."""
        self._c.fake_fail_kind(int(kind), n, error)

    @property
    def fault_pending(self) -> bool:
        """A fault that was asked for has not struck yet: the work was done in fewer calls."""
        return int(self._c.fake_faults_left()) > 0

    def fail_async(self, n: int, error: int = ILLEGAL_ADDRESS) -> None:
        """The n-th launch from now seems to work; who next waits for the device learns of it."""
        self._c.fake_fail_async(n, error)

    def set_memory(self, size: int) -> None:
        self._c.fake_set_memory(size)

    def devices(self, count: int) -> None:
        self._c.fake_devices(count)

    def driver(self, version: int) -> None:
        """The driver's CUDA version, 13010 for 13.1; 0: there is no driver."""
        self._c.fake_driver(version)

    def without_code(self, device: int) -> None:
        """The library has no kernels for this device."""
        self._c.fake_without_code(device)

    def skip_launches(self, on: bool) -> None:
        self._c.fake_skip_launches(int(on))

    def lazy(self, on: bool) -> None:
        """Do what is in a stream as late as CUDA allows."""
        self._c.fake_lazy(int(on))

    def schedule(self, order: int) -> None:
        """Blocks and threads in rising order (0), falling (1), or drawn from a seed."""
        self._c.fake_schedule(order)

    @property
    def calls(self) -> int:
        return int(self._c.fake_calls())

    @property
    def live(self) -> int:
        """Allocations, streams, events and graphs that exist."""
        return int(self._c.fake_live())

    @property
    def memory_used(self) -> int:
        return int(self._c.fake_memory_used())

    def count(self, what: Counter) -> int:
        return int(self._c.fake_count(int(what)))
