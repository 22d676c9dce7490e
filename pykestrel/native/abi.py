"""The C interface of libvcuda as ctypes sees it: structures and one prototype table, no policy.

Mirrors native/include/vcuda.h field by field; tests/contract/test_abi.py compiles the header and
compares every size and offset with these classes.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

ABI_VERSION = 1  # VCUDA_ABI_VERSION of the header this file mirrors

OK = 0
NOT_DONE = -1  # nothing changed; the caller may go on without the library
LOST = -2  # the device is lost; any status below -1 means so

# Kinds of numbers: VCUDA_F32 to VCUDA_Q4.
F32, BF16, Q8, Q4 = range(4)

# What a weight is in its layer: VCUDA_PROJ_Q to VCUDA_PROJ_HEAD.
PROJ_Q, PROJ_K, PROJ_V, PROJ_O, PROJ_GATE, PROJ_UP, PROJ_DOWN = range(7)
PROJ_FUSED_QKV, PROJ_FUSED_GU, PROJ_ROUTER, PROJ_EMBED, PROJ_HEAD = range(7, 12)
PROJ_EXPERT_GU, PROJ_EXPERT_DOWN = 0x1000, 0x2000  # of single experts: plus 0 to 4095
HEAD_LAYER = 0x7FFFFFF0  # the layer of PROJ_EMBED and PROJ_HEAD

KV_INT8, KV_F16, KV_F32 = range(3)

# What decode_run is to give back: VCUDA_OUT_NONE to VCUDA_OUT_TOP.
OUT_NONE, OUT_LOGITS, OUT_ALL_LOGITS, OUT_GREEDY, OUT_TOP = range(5)
TOP_MAX = 1024


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


class MatrixStruct(ctypes.Structure):
    """``vcuda_matrix``."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("stack", c_int64),
        ("n", c_int64),
        ("k", c_int64),
    ]


class CacheInfoStruct(ctypes.Structure):
    """``vcuda_cache_info``."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("budget", c_uint64),
        ("bytes", c_uint64),
        ("entries", c_uint64),
        ("pinned_bytes", c_uint64),
        ("hits", c_uint64),
        ("misses", c_uint64),
        ("uploads", c_uint64),
        ("evictions", c_uint64),
    ]


class ProductStruct(ctypes.Structure):
    """``vcuda_product``."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("rows", c_int32),
        ("wkey", c_uint64),
        ("index", c_int64),
        ("first", c_int64),
        ("y", c_int64),
        ("stride", c_int64),
    ]


class LayerStruct(ctypes.Structure):
    """``vcuda_layer``."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("moe", c_int32),
        ("window", c_int32),
        ("reserved", c_int32),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("o_bias", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
    ]


class DecodeConfigStruct(ctypes.Structure):
    """``vcuda_decode_config``."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("vocab", c_int32),
        ("ctx_size", c_int32),
        ("experts", c_int32),
        ("experts_per_token", c_int32),
        ("moe_intermediate", c_int32),
        ("norm_topk_prob", c_int32),
        ("group_size", c_int32),
        ("kv", c_int32),
        ("tied_head", c_int32),
        ("graph", c_int32),
        ("rms_norm_eps", c_float),
        ("final_norm", c_void_p),
        ("rope_cos", c_void_p),
        ("rope_sin", c_void_p),
        ("layer_params", POINTER(LayerStruct)),
        ("prefill_rows", c_int32),
        ("prefill_exact", c_int32),
        ("segment", c_int32),
        ("first_layer", c_int32),
    ]


class DecodeStepStruct(ctypes.Structure):
    """``vcuda_decode_step``."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("position", c_int32),
        ("count", c_int32),
        ("out", c_int32),
        ("vocab_limit", c_int32),
        ("top", c_int32),
        ("temperature", c_float),
        ("id", c_int32),
        ("top_count", c_int32),
        ("nonfinite", c_int32),
        ("max_logit", c_float),
        ("sum_exp", c_float),
        ("ids", c_void_p),
        ("logits", c_void_p),
        ("top_ids", c_void_p),
        ("top_logits", c_void_p),
        ("trace", c_void_p),
    ]


# C name -> class, for the layout test.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "vcuda_device_info": DeviceInfoStruct,
    "vcuda_phase": PhaseStruct,
    "vcuda_prof": ProfStruct,
    "vcuda_matrix": MatrixStruct,
    "vcuda_cache_info": CacheInfoStruct,
    "vcuda_product": ProductStruct,
    "vcuda_layer": LayerStruct,
    "vcuda_decode_config": DecodeConfigStruct,
    "vcuda_decode_step": DecodeStepStruct,
}

# (name, restype, argtypes). A c_int result is a status, except for those in NO_STATUS. Arrays of
# the caller (float *, void *) are c_void_p: NumPy gives their addresses as integers.
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
    ("vcuda_prof_timing", c_int, (c_void_p, c_int32)),
    ("vcuda_wkey", c_uint64, (c_int32, c_int32)),
    ("vcuda_cache_size", c_int, (POINTER(MatrixStruct), POINTER(c_uint64))),
    ("vcuda_cache_budget", c_int, (c_void_p, c_uint64)),
    ("vcuda_cache_stats", c_int, (c_void_p, POINTER(CacheInfoStruct))),
    ("vcuda_cache_begin", c_int, (c_void_p, c_uint64, POINTER(MatrixStruct), c_int32)),
    (
        "vcuda_cache_rows",
        c_int,
        (c_void_p, c_uint64, c_int64, c_int64, c_int32, c_void_p, c_void_p),
    ),
    ("vcuda_cache_end", c_int, (c_void_p, c_uint64)),
    ("vcuda_cache_fill", c_int, (c_void_p, c_uint64, POINTER(MatrixStruct), c_int32, c_uint64)),
    ("vcuda_cache_read", c_int, (c_void_p, c_uint64, c_int64, c_int64, c_void_p, c_void_p)),
    ("vcuda_cache_find", c_int, (c_void_p, c_uint64, POINTER(MatrixStruct))),
    ("vcuda_cache_pin", c_int, (c_void_p, c_uint64, c_int32)),
    ("vcuda_cache_drop", c_int, (c_void_p, c_uint64)),
    ("vcuda_dev_gemm", c_int, (c_void_p, c_uint64, c_int64, c_void_p, c_int32, c_void_p)),
    (
        "vcuda_dev_gemm_fused",
        c_int,
        (
            *(c_void_p, POINTER(ProductStruct), c_int32, c_void_p, c_int64, c_int64),
            *(c_void_p, c_int64),
        ),
    ),
    ("vcuda_decode_size", c_int, (POINTER(DecodeConfigStruct), POINTER(c_uint64))),
    ("vcuda_dev_decode_init", c_int, (c_void_p, POINTER(DecodeConfigStruct))),
    ("vcuda_dev_decode_free", c_int, (c_void_p,)),
    ("vcuda_dev_decode_run", c_int, (c_void_p, POINTER(DecodeStepStruct))),
    ("vcuda_dev_prefill", c_int, (c_void_p, POINTER(DecodeStepStruct))),
    ("vcuda_dev_decode_logits", c_int, (c_void_p, c_void_p)),
    ("vcuda_dev_layers_run", c_int, (c_void_p, c_int32, c_int32, c_void_p)),
    ("vcuda_trace_size", c_int, (c_void_p, POINTER(c_uint64))),
    ("vcuda_kv_position", c_int, (c_void_p, POINTER(c_int32))),
    ("vcuda_kv_seek", c_int, (c_void_p, c_int32)),
    (
        "vcuda_kv_read",
        c_int,
        (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    (
        "vcuda_kv_write",
        c_int,
        (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    ("vcuda_dev_bandwidth", c_int, (c_void_p, c_uint64, c_int32, POINTER(c_double))),
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
