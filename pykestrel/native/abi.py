"""The C interface of libvcuda as ctypes sees it: structures and one prototype table, no policy.

Mirrors native/include/vcuda.h field by field; tests/contract/test_abi.py compiles the header and
compares every size and offset with these classes.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

ABI_VERSION = 1  # VCUDA_ABI_VERSION of the header this file mirrors

OK = 0
NOT_DONE = -1  # nothing changed; the caller may go on without the library
LOST = -2  # the device is lost; any status below -1 means so


class DeviceInfoStruct(ctypes.Structure):
    """``vcuda_device_info``."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("index", c_int32),
        ("name", c_char * 256),
        ("uuid", c_char * 48),
        ("pci", c_char * 16),
        ("cc_major", c_int32),
        ("cc_minor", c_int32),
        ("sm_count", c_int32),
        ("sm_clock_khz", c_int32),
        ("memory_clock_khz", c_int32),
        ("memory_bus_bits", c_int32),
        ("driver_version", c_int32),
        ("runtime_version", c_int32),
        ("kernel_arch", c_int32),
        ("integrated", c_int32),
        ("memory_total", c_uint64),
        ("memory_free", c_uint64),
        ("l2_bytes", c_uint64),
        ("shared_per_block", c_uint64),
        ("peak_bytes_per_second", c_uint64),
    ]


class PhaseStruct(ctypes.Structure):
    """``vcuda_phase``."""

    _fields_ = [("count", c_uint64), ("ns", c_uint64)]


class ProfStruct(ctypes.Structure):
    """``vcuda_prof``."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("cache_probe", PhaseStruct),
        ("upload", PhaseStruct),
        ("h2d", PhaseStruct),
        ("gemm", PhaseStruct),
        ("reduce", PhaseStruct),
        ("attention", PhaseStruct),
        ("norm", PhaseStruct),
        ("moe", PhaseStruct),
        ("d2h_sync", PhaseStruct),
        ("tokens", c_uint64),
        ("launches", c_uint64),
        ("h2d_copies", c_uint64),
        ("h2d_bytes", c_uint64),
        ("d2h_copies", c_uint64),
        ("d2h_bytes", c_uint64),
        ("upload_copies", c_uint64),
        ("upload_bytes", c_uint64),
    ]


# C name -> class, for the layout test.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "vcuda_device_info": DeviceInfoStruct,
    "vcuda_phase": PhaseStruct,
    "vcuda_prof": ProfStruct,
}

# (name, restype, argtypes). A c_int result is a status, except for those in NO_STATUS.
PROTOTYPES: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("vcuda_abi_version", c_int, ()),
    ("vcuda_build_info", c_char_p, ()),
    ("vcuda_last_error", c_char_p, ()),
    ("vcuda_dev_count", c_int, (POINTER(c_int32),)),
    ("vcuda_driver_version", c_int, (POINTER(c_int32), POINTER(c_int32))),
    ("vcuda_dev_query", c_int, (c_int32, POINTER(DeviceInfoStruct))),
    ("vcuda_create", c_int, (c_int32, POINTER(c_void_p))),
    ("vcuda_destroy", c_int, (c_void_p,)),
    ("vcuda_dev_selftest", c_int, (c_void_p,)),
    ("vcuda_prof_read", c_int, (c_void_p, POINTER(ProfStruct))),
    ("vcuda_prof_reset", c_int, (c_void_p,)),
)

NO_STATUS = frozenset({"vcuda_abi_version"})


def bind(library: ctypes.CDLL, name: str) -> Any:
    """Give one symbol its restype and argtypes. Raises AttributeError when it is not there."""
    for known, restype, argtypes in PROTOTYPES:
        if known == name:
            function = getattr(library, name)
            function.restype = restype
            function.argtypes = list(argtypes)
            return function
    raise KeyError(name)
