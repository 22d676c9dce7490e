"""What the machine is: memory, cores, processor, and the BLAS kernel that NumPy runs on it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

# The widest vector, in bits, that OpenBLAS's x86 kernels use; any other kernel: 128.
KERNEL_BITS = {
    "SkylakeX": 512,
    "Cooperlake": 512,
    "SapphireRapids": 512,
    "Haswell": 256,
    "Zen": 256,
    "Excavator": 256,
}


def read(path: str) -> str:
    """The text of a file, "" when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty elsewhere."""
    first = read("/proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def nvidia_driver() -> str | None:
    """The version of the NVIDIA kernel driver; None where there is none."""
    words = read("/proc/driver/nvidia/version").split("\n", 1)[0].split()
    return next((w for w in words if w[:1].isdigit() and "." in w), None)


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> dict[str, int | None]:
    """Bytes of memory: ``total``, and ``available`` without swapping; None where unknown.

    A container's limit counts where it is the smaller one.
    """
    total: int | None = None
    available: int | None = None
    if sys.platform == "win32":
        return _windows_memory()
    for line in read("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == "MemTotal":
            total = int(value.split()[0]) * 1024
        elif key == "MemAvailable":
            available = int(value.split()[0]) * 1024
    if total is None:
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            return {"total": None, "available": None}
    limit = read("/sys/fs/cgroup/memory.max").strip()
    used = read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        total = int(limit)
        free = max(0, total - int(used))
        available = free if available is None else min(available, free)
    return {"total": total, "available": available}


def _windows_memory() -> dict[str, int | None]:
    class MemoryStatus(ctypes.Structure):  # MEMORYSTATUSEX
        _fields_ = [
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *((name, ctypes.c_uint64) for name in ("total", "available", "a", "b", "c", "d", "e")),
        ]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    windll: Any = getattr(ctypes, "windll", None)
    if windll is None or not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return {"total": None, "available": None}
    return {"total": status.total, "available": status.available}


def numpy_blas() -> dict[str, Any]:
    """NumPy's version and the BLAS it runs, as threadpoolctl sees it in this process."""
    import numpy

    blas: dict[str, Any] = {}
    try:
        import threadpoolctl
    except ImportError:
        try:
            built: Any = numpy.show_config(mode="dicts")
            found = built["Build Dependencies"]["blas"]
            blas = {"name": found["name"], "version": found["version"]}
        except Exception:  # show_config's shape is nobody's promise
            blas = {}
    else:
        for pool in threadpoolctl.threadpool_info():
            if pool.get("user_api") == "blas":
                blas = {
                    "name": pool.get("internal_api"),
                    "version": pool.get("version"),
                    "kernel": pool.get("architecture"),
                    "threads": pool.get("num_threads"),
                    "library": pool.get("filepath"),
                }
                break
    return {"version": numpy.__version__, "blas": blas, "note": blas_note(blas)}


def blas_note(
    blas: dict[str, Any], flags: str | None = None, vendor: str | None = None
) -> str | None:
    """What is wrong with the BLAS kernel for this processor, in one sentence; None: nothing.

    ``flags`` and ``vendor`` are those of /proc/cpuinfo (an x86 processor's) unless given.
    """
    if blas.get("name") != "openblas" or not blas.get("kernel"):
        return None
    info = cpuinfo() if flags is None else {}
    has = set((info.get("flags", "") if flags is None else flags).split())
    vendor = vendor or info.get("vendor_id", "")
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has:
        bits, name = 512, "AVX-512"
    elif {"avx2", "fma"} <= has:
        bits, name = 256, "AVX2"
    else:
        return None
    kernel = str(blas["kernel"])
    if KERNEL_BITS.get(kernel, 128) >= bits or (kernel == "Zen" and vendor == "AuthenticAMD"):
        return None
    forced = os.environ.get("OPENBLAS_CORETYPE")
    fix = (
        f"OPENBLAS_CORETYPE={forced} forces it: unset it for full speed"
        if forced
        else "a newer NumPy may choose a faster one"
    )
    return f"OpenBLAS runs its {kernel} kernel, and this processor has {name}; {fix}"
