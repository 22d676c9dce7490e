"""The C header, the ctypes mirror and the built library are one interface."""

from __future__ import annotations

import ctypes
import re
import shutil
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import pytest

from pykestrel.native import abi

from .conftest import NATIVE, run

HEADER = (NATIVE / "include/vcuda.h").read_text(encoding="utf-8")
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
FUNCTIONS = re.findall(r"VCUDA_API\s+([^;(]*?)\b(vcuda_\w+)\(([^)]*)\)", CODE)

C_TYPES: dict[str, Any] = {
    "int": c_int,
    "const char *": c_char_p,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "int32_t *": POINTER(c_int32),
    "uint64_t *": POINTER(c_uint64),
    "double *": POINTER(c_double),
    "vcuda_handle *": c_void_p,
    "vcuda_handle **": POINTER(c_void_p),
}
# Arrays are the addresses of NumPy's.
C_TYPES |= dict.fromkeys(
    ("void *", "const void *", "float *", "const float *", "const int32_t *"), c_void_p
)
for _name, _struct in abi.STRUCTS.items():
    C_TYPES[f"{_name} *"] = C_TYPES[f"const {_name} *"] = POINTER(_struct)


def parameter_types(text: str) -> tuple[Any, ...]:
    if text.strip() == "void":
        return ()
    types = []
    for parameter in " ".join(text.split()).split(","):
        match = re.fullmatch(r"\s*(.*?)\s*(\**)\s*(\w+)\s*", parameter)
        assert match, parameter
        types.append(C_TYPES[f"{match[1]} {match[2]}".strip()])
    return tuple(types)


def test_prototypes_equal_the_header() -> None:
    header = {
        name: (C_TYPES[result.strip()], parameter_types(parameters))
        for result, name, parameters in FUNCTIONS
    }
    ours = {name: (result, arguments) for name, result, arguments in abi.PROTOTYPES}
    assert ours == header


def test_layout_equals_ctypes(cc: str, tmp_path: Path) -> None:
    program = tmp_path / "abi_layout"
    done = run(
        [cc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
        + ["-I", NATIVE / "include", NATIVE / "tests/abi_layout.c", "-o", program]
    )
    assert done.returncode == 0, done.stderr
    lines = run([program]).stdout.split("\n")[:-1]

    ours = [f"VCUDA_ABI_VERSION {abi.ABI_VERSION}"]
    for name, struct in abi.STRUCTS.items():
        ours.append(f"{name} {ctypes.sizeof(struct)}")
        end = 0
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            assert place.offset == end, f"hidden padding before {name}.{field}"
            end = place.offset + place.size
            ours.append(f"{name}.{field} {place.offset} {place.size}")
        assert end == ctypes.sizeof(struct), f"hidden padding at the end of {name}"
    assert lines == ours

    declared = re.findall(r"typedef struct (\w+) \{(.*?)\}", CODE, flags=re.DOTALL)
    fields = {
        f"{name}.{f}" for name, body in declared for f in re.findall(r"(\w+)(?:\[\d+\])?;", body)
    }
    assert {line.split()[0] for line in lines if "." in line} == fields


def test_header_is_cplusplus_too(cxx: str, tmp_path: Path) -> None:
    source = tmp_path / "use.cpp"
    source.write_text('#include "vcuda.h"\nint main() { return 0; }\n', encoding="utf-8")
    done = run(
        [cxx, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]
        + ["-I", NATIVE / "include", source]
    )
    assert done.returncode == 0, done.stderr


def test_constants_equal_the_header() -> None:
    """Every number that the header defines has the value of abi's constant of the same name."""
    defines = dict(re.findall(r"#define VCUDA_(\w+) \(?(-?\w+)\)? *\n", CODE))
    values = {name: int(text, 0) for name, text in defines.items() if text[-1].isdigit()}
    assert len(values) >= 29
    assert values == {name: getattr(abi, name) for name in values}


def test_every_function_is_documented() -> None:
    for _, name, _ in FUNCTIONS:  # it follows a comment, or a function that shares one with it
        found = re.search(rf"(\*/|;)\nVCUDA_API [^;]*?\b{name}\(", HEADER)
        assert found, f"{name} has no comment"


def exported(library: Path) -> set[str]:
    if not shutil.which("nm"):
        pytest.skip("needs nm")
    symbols = run(["nm", "-D", "--defined-only", library]).stdout.split("\n")
    return {line.split()[-1] for line in symbols if line.strip()}


def test_exports_are_the_header(library: Path) -> None:
    assert exported(library) == {name for _, name, _ in FUNCTIONS}


def test_exports_of_the_emulated_library(fake_library: Path) -> None:
    """The same, and the functions of fake.h: no function of the header is missing in src/."""
    controls = re.findall(r"\b(fake_\w+)\(", (NATIVE / "tests/emu/fake.h").read_text("utf-8"))
    assert exported(fake_library) == {name for _, name, _ in FUNCTIONS} | set(controls)


def test_needs_no_cuda_library(library: Path) -> None:
    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", run(["readelf", "-d", library]).stdout))
    allowed = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    # before glibc 2.34 these were libraries of their own
    allowed |= {"libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-aarch64.so.1"}
    assert needed <= allowed
