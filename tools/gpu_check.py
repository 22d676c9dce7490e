#!/usr/bin/env python3
"""Check the native library on a machine with a GPU, and write what was seen as one JSON.

    python3 tools/gpu_check.py [--report tests/gpu/report.json]

Builds libvcuda for the GPU that is here, runs tests/gpu and the contract tests of the C ABI against
it, runs the C program of docs/abi.md under compute-sanitizer, and writes a report that names the
sources' hash, the GPU, the driver, and every result. Needs nvcc, CMake, a C compiler, and a Python
with pykestrel's dependencies, pytest and hypothesis; exits 1 when anything failed. The report of
the last run is committed, and tests/contract/test_gpu_report.py says on any machine whether it fits
the sources.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu-check"
TESTS = [
    "tests/gpu",
    *(f"tests/contract/test_{name}.py" for name in ("abi", "native", "loader", "doctor")),
]
# What each tool of compute-sanitizer is asked for beyond its defaults.
SANITIZERS = {
    "memcheck": ["--leak-check", "full"],
    "racecheck": [],
    "initcheck": [],
    "synccheck": [],
}


def sources_hash(root: Path = ROOT) -> str:
    """SHA-256 over the names and bytes of every file that becomes part of the library."""
    sha = hashlib.sha256()
    native = root / "native"
    files = [p for p in native.rglob("*") if p.is_file() and "tests" not in p.parts]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        sha.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def run(command: Sequence[object], **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; stdout and stderr come together, and are echoed."""
    print("gpu_check:", *command, file=sys.stderr, flush=True)
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **env},
        check=False,
    )
    print(done.stdout, file=sys.stderr, flush=True)
    return done


def build() -> Path:
    """libvcuda for the GPU of this machine."""
    for command in (
        ["cmake", "-S", ROOT, "-B", BUILD, "-DPYKESTREL_CUDA=ON", "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", BUILD, "--parallel"],
    ):
        if run(command).returncode != 0:
            sys.exit("gpu_check: the native library could not be built; the reason stands above")
    return next(BUILD.rglob("libvcuda.so"))


def run_tests(library: Path) -> dict[str, Any]:
    """The counts of pytest, and the names of what did not pass."""
    junit = BUILD / "junit.xml"
    run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
        + ["-m", "not slow", *TESTS],
        PYKESTREL_LIB=str(library),
        PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    if not junit.exists():
        sys.exit("gpu_check: pytest wrote no results; the reason stands above")
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    not_passed: dict[str, str] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error")]
        skipped = [child for child in case if child.tag == "skipped"]
        counts["failed" if bad else "skipped" if skipped else "passed"] += 1
        for child in (bad + skipped)[:1]:
            not_passed[name] = f"{child.tag}: {(child.get('message') or '').splitlines()[:1]}"
    return {**counts, "not_passed": not_passed}


def sanitize(library: Path) -> dict[str, str]:
    """The last line of each compute-sanitizer tool over the C program of docs/abi.md."""
    text = (ROOT / "docs/abi.md").read_text(encoding="utf-8")
    example = re.search(r"```c\n(.*?)```", text, flags=re.DOTALL)
    if example is None:
        sys.exit("gpu_check: docs/abi.md holds no C program")
    program = BUILD / "example"
    program.with_suffix(".c").write_text(example[1], encoding="utf-8")
    link = [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-lvcuda"]
    include = ["-I", ROOT / "native" / "include"]
    done = run(["cc", "-std=c99", program.with_suffix(".c"), *include, *link, "-o", program])
    if done.returncode != 0:
        return {"example": "did not compile"}
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"compute-sanitizer": "not installed"}
    results = {}
    for name, options in SANITIZERS.items():
        done = run([tool, "--tool", name, *options, "--error-exitcode", "9", program])
        summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        verdict = summary[-1].replace("=", "").strip() if summary else "no summary"
        results[name] = f"exit {done.returncode}: {verdict}"
    return results


def devices(library: Path) -> dict[str, Any]:
    """What the library says of the machine."""
    os.environ["PYKESTREL_LIB"] = str(library)
    sys.path.insert(0, str(ROOT))
    from pykestrel import native

    info = native.dev_query(0)
    smi = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).stdout
    return {
        "gpu": info.name,
        "driver": smi.split()[0] if smi.split() else "unknown",
        "compute_capability": f"{info.cc_major}.{info.cc_minor}",
        "driver_cuda": info.driver_version,
        "peak_gb_per_s": round(info.peak_bytes_per_second / 1e9),
        "build": native.build_info(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, default=ROOT / "tests" / "gpu" / "report.json")
    report_path = parser.parse_args().report
    started = time.time()
    library = build()
    report: dict[str, Any] = {
        "sources_sha256": sources_hash(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **devices(library),
        "tests": run_tests(library),
        "sanitizer": sanitize(library),
        "seconds": round(time.time() - started),
    }
    clean = all(r.startswith("exit 0:") for r in report["sanitizer"].values())
    report["passed"] = clean and report["tests"]["failed"] == 0 and report["tests"]["passed"] > 0
    temporary = report_path.with_name(report_path.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    temporary.replace(report_path)
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
