"""libvcuda for Python programs: one thin typed function for each C function.

Importing this module loads nothing; the first call does. A C call that fails raises `NativeError`
with the C status (-1: not done and nothing changed; below -1: the device is lost) and the
library's own sentence. A library that cannot be found or loaded raises `LibraryUnavailable`, which
names every path tried. native/include/vcuda.h says what each function does.

    from pykestrel import native
    print(native.state().reason)
    for index in range(native.dev_count()):
        print(native.dev_query(index))
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import LibraryUnavailable, NativeError
from . import abi
from .abi import ABI_VERSION
from .handle import Handle, create, destroy
from .loader import LoadResult, find, load

if TYPE_CHECKING:
    from .decode import (
        TOP_MAX,
        DecodeConfig,
        KVRows,
        Layer,
        Step,
        decode_size,
        dev_bandwidth,
        dev_decode_free,
        dev_decode_init,
        dev_decode_logits,
        dev_decode_run,
        dev_layers_run,
        dev_prefill,
        kv_position,
        kv_read,
        kv_seek,
        kv_write,
        trace_size,
    )
    from .products import Product, Products, dev_gemm, dev_gemm_fused
    from .weights import (
        HEAD_LAYER,
        CacheInfo,
        Matrix,
        Proj,
        cache_begin,
        cache_budget,
        cache_drop,
        cache_end,
        cache_fill,
        cache_find,
        cache_pin,
        cache_read,
        cache_rows,
        cache_size,
        cache_stats,
        wkey,
    )

__all__ = [
    "ABI_VERSION",
    "HEAD_LAYER",
    "TOP_MAX",
    "CacheInfo",
    "DecodeConfig",
    "DeviceInfo",
    "Handle",
    "KVRows",
    "Layer",
    "LibraryUnavailable",
    "LoadResult",
    "Matrix",
    "NativeError",
    "Phase",
    "Product",
    "Products",
    "Prof",
    "Proj",
    "State",
    "Step",
    "abi_version",
    "build_info",
    "cache_begin",
    "cache_budget",
    "cache_drop",
    "cache_end",
    "cache_fill",
    "cache_find",
    "cache_pin",
    "cache_read",
    "cache_rows",
    "cache_size",
    "cache_stats",
    "create",
    "decode_size",
    "destroy",
    "dev_bandwidth",
    "dev_count",
    "dev_decode_free",
    "dev_decode_init",
    "dev_decode_logits",
    "dev_decode_run",
    "dev_gemm",
    "dev_gemm_fused",
    "dev_layers_run",
    "dev_prefill",
    "dev_query",
    "dev_selftest",
    "driver_version",
    "find",
    "kv_position",
    "kv_read",
    "kv_seek",
    "kv_write",
    "last_error",
    "load",
    "prof_read",
    "prof_reset",
    "prof_timing",
    "state",
    "trace_size",
    "wkey",
]


def __getattr__(name: str) -> Any:
    """What has arrays in it comes on first use: `doctor` must work where NumPy does not."""
    if name in __all__:
        for module in ("decode", "products", "weights"):
            found = getattr(import_module(f".{module}", __name__), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class DeviceInfo:
    """``vcuda_device_info``: one GPU. Bytes, kHz; a CUDA version is 13000 for 13.0."""

    index: int
    name: str
    uuid: str
    pci: str
    cc_major: int
    cc_minor: int
    sm_count: int
    sm_clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    driver_version: int
    runtime_version: int
    kernel_arch: int  # 90: machine code for 9.0 would run; 0: the library has no code for it
    integrated: int
    memory_total: int
    memory_free: int
    l2_bytes: int
    shared_per_block: int
    peak_bytes_per_second: int


@dataclass(frozen=True)
class Phase:
    """``vcuda_phase``: how often, and nanoseconds in all."""

    count: int
    ns: int


@dataclass(frozen=True)
class Prof:
    """``vcuda_prof``: counters since the handle was created or `prof_reset`."""

    cache_probe: Phase
    upload: Phase
    h2d: Phase
    gemm: Phase
    reduce: Phase
    attention: Phase
    norm: Phase
    moe: Phase
    d2h_sync: Phase
    tokens: int
    launches: int
    h2d_copies: int
    h2d_bytes: int
    d2h_copies: int
    d2h_bytes: int
    upload_copies: int
    upload_bytes: int


@dataclass(frozen=True)
class State:
    """Whether a GPU can be used, and the one sentence that says why or why not."""

    devices: int  # 0: none can be used
    reason: str
    library: bool  # the library was found and loaded
    broken: bool  # a library is there, or was named, and cannot be used


def abi_version() -> int:
    """The library's ABI version; equal to `ABI_VERSION`, or it would not have been loaded."""
    return int(load().vcuda_abi_version())


def build_info() -> dict[str, Any]:
    """How the library was built: version, abi, cuda_toolkit, archs, host_compiler, build_type."""
    info: dict[str, Any] = json.loads(load().vcuda_build_info())
    return info


def last_error() -> str:
    """Why the calling thread's last unsuccessful call did not do its work; "" before the first."""
    return bytes(load().vcuda_last_error()).decode("utf-8", "replace")


def dev_count() -> int:
    """Devices that can be used; 0 without a driver or a GPU, and `last_error` then says why."""
    count = ctypes.c_int32(0)
    load().vcuda_dev_count(ctypes.byref(count))
    return count.value


def driver_version() -> tuple[int, int]:
    """CUDA version of the driver (0: no driver) and of the library's runtime; 13000 is 13.0."""
    driver, runtime = ctypes.c_int32(0), ctypes.c_int32(0)
    load().vcuda_driver_version(ctypes.byref(driver), ctypes.byref(runtime))
    return driver.value, runtime.value


def dev_query(index: int) -> DeviceInfo:
    """Describe one device. Creates its CUDA context, which takes some hundred MB of its memory."""
    raw = abi.DeviceInfoStruct(struct_size=ctypes.sizeof(abi.DeviceInfoStruct))
    load().vcuda_dev_query(index, ctypes.byref(raw))
    values: dict[str, Any] = {}
    for field in DeviceInfo.__dataclass_fields__:
        value = getattr(raw, field)
        values[field] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return DeviceInfo(**values)


def dev_selftest(handle: Handle) -> None:
    """Copy 256 integers there, run one kernel on them, copy them back and compare."""
    load().vcuda_dev_selftest(handle.pointer)


def prof_read(handle: Handle) -> Prof:
    """The counters of this handle."""
    raw = abi.ProfStruct(struct_size=ctypes.sizeof(abi.ProfStruct))
    load().vcuda_prof_read(handle.pointer, ctypes.byref(raw))
    values: dict[str, Any] = {}
    for field in Prof.__dataclass_fields__:
        value = getattr(raw, field)
        values[field] = (
            Phase(value.count, value.ns) if isinstance(value, abi.PhaseStruct) else value
        )
    return Prof(**values)


def prof_reset(handle: Handle) -> None:
    """Set all counters of this handle to zero."""
    load().vcuda_prof_reset(handle.pointer)


def prof_timing(handle: Handle, on: bool) -> None:
    """Time every device phase with events; decoding is then submitted kernel by kernel."""
    load().vcuda_prof_timing(handle.pointer, int(on))


def state() -> State:
    """Can a GPU be used? Never raises: what is wrong is the answer."""
    result = find()
    if result.library is None:
        return State(0, result.error or "the CUDA library is not there", False, result.broken)
    try:
        devices = dev_count()
        reason = f"{devices} CUDA device{'s' if devices != 1 else ''}" if devices else last_error()
    except NativeError as e:
        return State(0, str(e), True, False)
    return State(devices, reason, True, False)
