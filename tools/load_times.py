#!/usr/bin/env python3
"""Measure what a user waits for: from starting the process to the first token of a short prompt.

    python3 tools/load_times.py [--folder /dev/shm] [--case SHAPE:KIND:QUANT:SECONDS]...

For each case a model of random weights is made (tools/make_model.py), read once so that it is in
the page cache, and run in fresh processes: `pykestrel run --cuda -p "Why is the sky blue?" -n 1`,
with the tokenizer and the chat template of Qwen3 or those of --tokenizer. The clock starts before
the process does and stops at the first byte of the token on its stdout. Beside it stand what the
process itself says of loading, and what would be the same with no weights at all ("bare"): Python,
imports, the driver and a CUDA context. A model is deleted before the next one is made. Prints one
JSON; exits 1 when a case failed, not when it was slow. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIECE = 16 << 20  # bytes of one read
PROMPT = "Why is the sky blue?"


class Failed(Exception):
    """A case could not be measured; one sentence."""


@dataclass(frozen=True)
class Case:
    shape: str  # or a config.json
    kind: str  # of the files
    quant: str  # of the weights in use
    limit: float  # seconds to the first token on a machine with an H200 and 16 cores

    @classmethod
    def parse(cls, text: str) -> Case:
        try:
            shape, kind, quant, limit = text.rsplit(":", 3)
            return cls(shape, kind, quant, float(limit))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"SHAPE:KIND:QUANT:SECONDS is wanted, got {text!r}"
            ) from None


ROOM = 65_000_000_000  # bytes of the largest case, and a little
CASES = (
    Case("qwen3-8b", "bf16", "q8", 5),
    Case("qwen3-30b-a3b", "q4", "q4", 4),
    Case("qwen3-30b-a3b", "bf16", "q4", 15),  # 61 GB
)

# What a process does before it opens a model, and when it was done with each part.
BARE = """
import json, sys, time
marks = [("python_s", time.monotonic())]
import pykestrel.cli.main, pykestrel.cli.run, pykestrel.model, pykestrel.sampling
import pykestrel.loading.on_device, pykestrel.engine.cuda
from pykestrel import native
marks.append(("imports_s", time.monotonic()))
if sys.argv[1] == "cuda":
    native.state()
    marks.append(("driver_s", time.monotonic()))
    handle = native.create(0)
    marks.append(("context_s", time.monotonic()))
    native.destroy(handle)
marks.append(("destroy_s", time.monotonic()))
from pathlib import Path
from pykestrel.loading.source import Source
from pykestrel.text.tokenizer import Tokenizer
Tokenizer.from_source(Source("dir", Path(sys.argv[2]), "a tokenizer"))
marks.append(("tokenizer_s", time.monotonic()))
print(json.dumps(marks), flush=True)
"""

# What `run --verbose` says of loading, on any of its lines.
SAID = {
    "loaded_s": r"loaded in ([\d.]+) s",
    "weights_s": r"weights ([\d.]+) s;",
    "threads": r"(\d+) threads? busy",
    "read_s": r"read ([\d.]+) s",
    "convert_s": r"convert ([\d.]+) s",
    "upload_s": r"upload ([\d.]+) s",
    "prompt_s": r"first token ([\d.]+) s",
}


def say(text: str) -> None:
    print(f"load_times: {text}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    """That of a user whose package is installed: its bytecode is kept."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


@dataclass
class Process:
    """One finished process and when things happened, in seconds after its start."""

    status: int
    stdout: str
    stderr: str
    began: float  # on the clock of time.monotonic
    first_s: float  # the first byte on stdout
    exit_s: float
    cpu_s: float
    peak_bytes: int  # resident memory; pages of mapped files count


def run(command: Sequence[object]) -> Process:
    words = [str(word) for word in command]
    with tempfile.TemporaryFile() as stderr:
        began = time.monotonic()
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
        )
        try:
            assert process.stdout is not None
            stdout = process.stdout.read(1 << 16) or b""
            first = time.monotonic()
            while more := process.stdout.read(1 << 16):
                stdout += more
            _, waited, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        ended = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(waited)
        process.stdout.close()
        stderr.seek(0)
        return Process(
            status=process.returncode,
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.read().decode("utf-8", "replace"),
            began=began,
            first_s=first - began,
            exit_s=ended - began,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss * 1024,
        )


def checked(command: Sequence[object], what: str) -> Process:
    done = run(command)
    if done.status != 0 or not done.stdout:
        lines = done.stderr.strip().splitlines() or [f"exit {done.status} without a word"]
        raise Failed(f"{what}: {lines[-1]}")
    return done


def bare(device: str, runs: int, tokenizer: Path) -> dict[str, float]:
    """Medians of what every process takes that has no model to load, and of the tokenizer, which
    is read beside the weights."""
    command: list[object] = [sys.executable, "-c", BARE, device, tokenizer]
    checked(command, "a process without a model")  # writes bytecode, wakes the driver
    parts: dict[str, list[float]] = {}
    for _ in range(runs):
        done = checked(command, "a process without a model")
        before = done.began
        for name, at in json.loads(done.stdout):
            parts.setdefault(name, []).append(at - before)
            before = at
            if name in ("imports_s", "context_s"):
                parts.setdefault(f"until_{name}", []).append(at - done.began)
        parts.setdefault("exit_s", []).append(done.began + done.exit_s - before)
    return {name: round(statistics.median(times), 3) for name, times in parts.items()}


def unpack_tokenizer(to: Path) -> Path:
    """That of Qwen3, which the tests have."""
    packed = ROOT / "tests/golden/data/tokenizers/qwen3"
    text = lzma.decompress((packed / "tokenizer.json.xz").read_bytes())
    (to / "tokenizer.json").write_bytes(text)
    shutil.copyfile(packed / "tokenizer_config.json", to / "tokenizer_config.json")
    return to


def read_all(directory: Path) -> dict[str, float]:
    """Read every file once on all cores: afterwards it is in the page cache if there is room."""
    pieces = [
        (path, offset)
        for path in sorted(directory.iterdir())
        for offset in range(0, path.stat().st_size, PIECE)
    ]

    def read(part: Sequence[tuple[Path, int]]) -> int:
        buffer, total = bytearray(PIECE), 0
        for path, offset in part:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                total += file.readinto(buffer) or 0
        return total

    workers = len(os.sched_getaffinity(0))
    before = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        nbytes = sum(pool.map(read, [pieces[i::workers] for i in range(workers)]))
    seconds = time.monotonic() - before
    return {"bytes": nbytes, "read_gb_per_s": round(nbytes / 1e9 / seconds, 1)}


def measure(case: Case, directory: Path, device: str, runs: int, tokenizer: Path) -> dict[str, Any]:
    """One case, from making its files to its last run."""
    before = time.monotonic()
    maker = [sys.executable, ROOT / "tools/make_model.py", case.shape, directory]
    maker += ["--kind", case.kind, "--tokenizer", tokenizer]
    checked(maker, f"{case.shape} as {case.kind} cannot be made")
    result: dict[str, Any] = {"make_s": round(time.monotonic() - before, 1)}
    result |= read_all(directory)
    command = [sys.executable, "-m", "pykestrel", "run", f"--{device}", "-m", directory]
    command += ["--quant", case.quant, "-p", PROMPT, "-n", "1", "--temp", "0", "--verbose"]
    result["runs"] = []
    for _ in range(runs):
        done = checked(command, f"{case.shape} as {case.kind} did not run as {case.quant}")
        seen: dict[str, Any] = {
            "first_token_s": round(done.first_s, 3),
            "exit_s": round(done.exit_s, 3),
            "cpu_s": round(done.cpu_s, 2),
            "peak_gb": round(done.peak_bytes / 1e9, 2),
            "token": done.stdout.rstrip("\n"),
        }
        for name, pattern in SAID.items():
            if found := re.search(pattern, done.stderr):
                seen[name] = float(found[1])
        if found := re.search(r"preload: .*", done.stderr):
            seen["preload"] = found[0]
        say(json.dumps(seen))
        result["runs"].append(seen)
    tokens = {seen["token"] for seen in result["runs"]}
    if len(tokens) > 1:
        raise Failed(f"{case.shape}: equal runs gave the tokens {', '.join(sorted(tokens))}")
    result["seconds"] = statistics.median(seen["first_token_s"] for seen in result["runs"])
    result["within_limit"] = result["seconds"] <= case.limit
    return result


def attempt(case: Case, folder: Path, device: str, runs: int, tokenizer: Path) -> dict[str, Any]:
    """`measure`, or why it failed."""
    say(f"{case.shape}, {case.kind} files, as {case.quant}, in {folder}")
    with tempfile.TemporaryDirectory(prefix="pykestrel-load-", dir=folder) as place:
        try:
            return asdict(case) | measure(case, Path(place) / "model", device, runs, tokenizer)
        except Failed as error:
            say(f"error: {error}")
            return asdict(case) | {"error": str(error)}


def choose_folder(needed: int) -> Path:
    """Memory where there is room for it, else the disk."""
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if folder.is_dir() and shutil.disk_usage(folder).free > needed:
            return folder
    return Path(tempfile.gettempdir())  # what does not fit there is said case by case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the models are made, one at a time")
    parser.add_argument("--case", type=Case.parse, action="append", metavar="SHAPE:KIND:QUANT:S")
    parser.add_argument("--tokenizer", type=Path, help="a directory whose tokenizer they all get")
    parser.add_argument("--runs", type=int, choices=range(1, 101), metavar="N", default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left behind
    report: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "cases": [],
    }
    folder = args.folder or choose_folder(ROOM)
    try:
        with tempfile.TemporaryDirectory(prefix="pykestrel-load-") as place:
            tokenizer = args.tokenizer or unpack_tokenizer(Path(place))
            report["bare"] = bare(args.device, args.runs, tokenizer)
            say(json.dumps(report["bare"]))
            for case in args.case or CASES:
                report["cases"].append(attempt(case, folder, args.device, args.runs, tokenizer))
    except Failed as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        say(f"error: {folder}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report, indent=1))
    return int(any("error" in result for result in report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
