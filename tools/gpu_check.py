#!/usr/bin/env python3
"""Check the native library on a machine with a GPU, and write what was seen as one JSON.

    python3 tools/gpu_check.py [--models DIR] [--keep] [--report tests/gpu/report.json]

Builds libvcuda for the GPU that is here, runs tests/gpu and the contract tests of the C ABI against
it, builds and runs the C programs (that of docs/abi.md and tools/embed.c, the latter also under
compute-sanitizer), measures decoding speed and loading on models of random weights, and writes a
report that names the sources' hash, the GPU, the driver, and every result. Loading needs a folder
with room for 65 GB (--models), best in memory. Needs nvcc, CMake, a C compiler, and a Python with
pykestrel's dependencies, pytest and hypothesis; exits 1 when anything failed. Where one run may not
be that long, --skip leaves stages out and a later run with --keep adds them to the report. That of
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu-check"
TESTS = [
    "tests/gpu",
    *(f"tests/contract/test_{name}.py" for name in ("abi", "native", "loader", "doctor")),
]
# What is measured: a shape with arguments of `pykestrel bench`, and of each of its tests the
# tokens/s that an H200 must reach.
BENCHMARKS: list[tuple[str, list[float | None]]] = [
    ("qwen3-30b-a3b --quant q4 -p 512,2048,8192 -n 64", [15_000, 30_000, None, 400]),
    ("qwen3-30b-a3b --quant q4 -p 0 -n 64 -d 32768", [230]),
    ("qwen3-30b-a3b --quant q4 -p 128000 -n 0 -r 1 -c 128k", [None]),
    ("qwen3-30b-a3b --quant q4 -p 0 -n 64 -d 128000 -c 128k", [None]),
    ("qwen3-8b --quant q8 -p 512,2048,8192 -n 64 --ttft 1k", [15_000, 30_000, None, 300, None]),
    ("qwen3-8b --quant q4 -p 2048 -n 64", [None, None]),
    ("qwen3-1.7b --quant q8 -p 512,2048,8192 -n 64", [45_000, 90_000, None, 700]),
    ("qwen3-1.7b --quant bf16 --kv f16 -p 2048 -n 64", [None, None]),
]
STAGES = ("programs", "tests", "benchmarks", "loading", "sanitizer")
# Runs of tools/embed.c under compute-sanitizer: the tool, its options, and the program's arguments
# (kind, K/V, dense or moe, tokens, longest prompt). racecheck makes a token take a seventh of a
# second, so it sees few of them.
SANITIZERS: dict[str, tuple[str, list[str], list[str]]] = {
    "memcheck": ("memcheck", ["--leak-check", "full"], ["all", "all", "all", "8", "160"]),
    "initcheck": ("initcheck", [], ["all", "all", "all", "8", "33"]),
    "synccheck": ("synccheck", [], ["all", "all", "all", "8", "33"]),
    "racecheck": ("racecheck", [], ["all", "all", "all", "8", "0"]),
    "racecheck of prompts": ("racecheck", [], ["q8", "int8", "dense", "4", "160"]),
}
SANITIZER_LIMIT = 120  # seconds of one run


def sources_hash(root: Path = ROOT) -> str:
    """SHA-256 over the names and bytes of every file that becomes part of the library."""
    sha = hashlib.sha256()
    native = root / "native"
    files = [p for p in native.rglob("*") if p.is_file() and "tests" not in p.parts]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        sha.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def run(
    command: Sequence[object], limit: float | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; stdout and stderr come together, and are echoed. After
    ``limit`` seconds it is ended, with the status 124."""
    print("gpu_check:", *command, file=sys.stderr, flush=True)
    began = time.monotonic()
    words = [str(word) for word in command]
    if limit is not None:
        words = ["timeout", "--kill-after=5", str(limit), *words]
    done = subprocess.run(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, **env},
        check=False,
    )
    print(done.stdout, file=sys.stderr)
    print(f"gpu_check: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
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


def compile_c(source: Path, library: Path) -> Path | None:
    """A C program linked with the library; None when it does not compile."""
    program = BUILD / source.stem
    link = [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-lvcuda", "-lm"]
    include = ["-I", ROOT / "native" / "include"]
    done = run(["cc", "-std=c11", "-O2", source, *include, *link, "-o", program])
    return program if done.returncode == 0 else None


def embedded(library: Path) -> dict[str, str]:
    """The C programs: the one of docs/abi.md, and tools/embed.c alone and under the sanitizer."""
    text = (ROOT / "docs/abi.md").read_text(encoding="utf-8")
    example = re.search(r"```c\n(.*?)```", text, flags=re.DOTALL)
    if example is None:
        sys.exit("gpu_check: docs/abi.md holds no C program")
    (BUILD / "example.c").write_text(example[1], encoding="utf-8")
    results = {}
    for source in (BUILD / "example.c", ROOT / "tools" / "embed.c"):
        program = compile_c(source, library)
        status = run([program]).returncode if program else "did not compile"
        results[source.name] = f"exit {status}"
    return results


def sanitize(library: Path) -> dict[str, str]:
    """The last line of compute-sanitizer over tools/embed.c, which uses every kernel."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"compute-sanitizer": "not installed"}
    program = compile_c(ROOT / "tools" / "embed.c", library)
    if program is None:
        return {"embed.c": "did not compile"}
    results = {}
    for name, (which, options, arguments) in SANITIZERS.items():
        command = [tool, "--tool", which, *options, "--error-exitcode", "9"]
        done = run([*command, program, *arguments], limit=SANITIZER_LIMIT)
        summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        verdict = summary[-1].replace("=", "").strip() if summary else "no summary"
        results[name] = f"exit {done.returncode}: {verdict}"
    return results


def measure(library: Path) -> list[dict[str, Any]]:
    """Speed of prompts and of decoding on models of random weights, one process a model."""
    results: list[dict[str, Any]] = []
    for arguments, floors in BENCHMARKS:
        log = BUILD / "bench.json"
        command = [sys.executable, "-m", "pykestrel", "bench", "--cuda", "--json", "--synthetic"]
        print("gpu_check:", *command, arguments, file=sys.stderr, flush=True)
        with log.open("w", encoding="utf-8") as out:
            status = subprocess.run(
                [*command, *arguments.split()],
                cwd=ROOT,
                stdout=out,
                env={**os.environ, "PYKESTREL_LIB": str(library)},
                check=False,
            ).returncode
        facts = json.loads(log.read_text(encoding="utf-8")) if status == 0 else {}
        tests = facts.get("tests", [{"error": f"exit {status}"}])
        for test, floor in zip(tests, floors, strict=status == 0):
            known = {key: value for key, value in test.items() if key != "seconds"}
            results.append({"arguments": arguments, "floor": floor, **known})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def measure_loading(library: Path, models: Path | None) -> dict[str, Any]:
    """Seconds from a process's start to its first token: what tools/load_times.py prints."""
    command = [sys.executable, str(ROOT / "tools/load_times.py")]
    command += [] if models is None else ["--folder", str(models)]
    print("gpu_check:", *command, file=sys.stderr, flush=True)
    env = {**os.environ, "PYKESTREL_LIB": str(library)}
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, env=env, check=False)
    if not done.stdout:
        return {"error": f"exit {done.returncode}", "cases": []}
    report: dict[str, Any] = json.loads(done.stdout)
    return report


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


def earlier(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The stages that passed of the report at ``path``, if it is of what is checked now; and its
    seconds."""
    if not path.exists():
        return {}
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if any(before.get(name) != value for name, value in report.items() if name != "date"):
        return {}
    if "skipped" in before.get("loading", {}):
        del before["loading"]
    passed = [name for name in STAGES if name in before and good(name, before[name])]
    return {name: before[name] for name in (*passed, "seconds") if name in before}


def good(stage: str, found: Any) -> bool:
    """Whether everything that a stage ran did what it must."""
    if stage == "programs":
        return all(status == "exit 0" for status in found.values())
    if stage == "sanitizer":
        return all(verdict.startswith("exit 0:") for verdict in found.values())
    if stage == "tests":
        return bool(found["failed"] == 0 and found["passed"] > 0)
    results = [found, *found["cases"]] if stage == "loading" else found
    return not any("error" in result for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, default=ROOT / "tests" / "gpu" / "report.json")
    parser.add_argument("--skip", action="append", default=[], choices=STAGES)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep what passed in a report of the same sources, GPU and driver, and run the rest",
    )
    parser.add_argument(
        "--models", type=Path, help="where to make the models that are loaded, 65 GB"
    )
    args = parser.parse_args()
    started = time.time()
    library = build()
    report: dict[str, Any] = {
        "sources_sha256": sources_hash(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **devices(library),
    }
    stages: dict[str, Callable[[], Any]] = {
        "programs": lambda: embedded(library),
        "tests": lambda: run_tests(library),
        "benchmarks": lambda: measure(library),
        "loading": lambda: measure_loading(library, args.models),
        "sanitizer": lambda: sanitize(library),
    }
    kept = earlier(args.report, report) if args.keep else {}
    seconds = kept.pop("seconds", 0)
    if args.models is None and "loading" not in kept:
        del stages["loading"]
        report["loading"] = {"skipped": "no --models, a folder with 65 GB of room", "cases": []}
    for name, stage in stages.items():
        if name in kept:
            report[name] = kept[name]
        elif name not in args.skip:
            report[name] = stage()
            write(args.report, report)  # what a time limit cuts off leaves the rest readable
    report["seconds"] = seconds + round(time.time() - started)
    partial = not set(STAGES) <= report.keys()
    report["passed"] = not partial and all(good(stage, report[stage]) for stage in STAGES)
    write(args.report, report)
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] or partial else 1


def write(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
