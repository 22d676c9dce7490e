"""Build libvcuda, or a C++ program on its kernels, on the emulated CUDA runtime of
native/tests/emu: with g++ (11 or later) alone, for any machine.

    library = emulated_library()                  # libvcuda.so, for PYKESTREL_LIB
    library = emulated_library(sanitize=True)     # under AddressSanitizer and UBSan
    program = build_program(["native/tests/kernels_gemv.cpp", "native/kernels/gemv.cu"])

Objects are kept under build/emulated by what they were made from, so that what has not changed is
not compiled again. From a shell: ``python tests/native_build.py [--sanitize] [SOURCE...]``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
EMULATOR = NATIVE / "tests/emu"
BUILD = ROOT / "build/emulated"
COMPILERS = 2  # at the same time
DAYS_KEPT = 7
FORMAT = "2"  # of what is kept: another one makes everything anew

FLAGS = [
    *("-std=c++17", "-g", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-pthread"),
    *("-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
    *("-DVCUDA_EMULATE", "-DVCUDA_BUILDING"),
    *('-DVCUDA_VERSION="0.0.0-emulated"', '-DVCUDA_ARCHS="emulated"', '-DVCUDA_TOOLKIT="none"'),
    *('-DVCUDA_HOST_COMPILER="any"', '-DVCUDA_BUILD_TYPE="Debug"'),
    *(f"-I{EMULATOR}", f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}"),
    f"-I{NATIVE / 'kernels'}",
]
PLAIN = ["-O1"]
SANITIZE = [
    *("-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"),
    "-fno-sanitize-recover=all",
]


class BuildError(Exception):
    """The compiler refused; its own words."""


@cache
def compiler() -> str | None:
    """g++ (the emulator's linker script and section attributes are GNU's), or None."""
    return shutil.which("g++") if sys.platform.startswith("linux") else None


@cache
def _compiler_version() -> str:
    return _run([str(compiler()), "--version"]).split("\n", 1)[0]


def _run(command: list[str]) -> str:
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # no sanitizer in compilers
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def _digest(parts: Sequence[str], files: Sequence[Path]) -> str:
    state = hashlib.sha256("\0".join([FORMAT, _compiler_version(), *parts]).encode())
    for file in files:
        state.update(f"\0{file}\0".encode())
        state.update(file.read_bytes() if file.is_file() else b"")
    return state.hexdigest()[:24]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One build at a time: a second process waits and then finds everything done."""
    import fcntl

    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        old = time.time() - DAYS_KEPT * 86400
        for path in BUILD.iterdir():
            if path.stat().st_mtime < old:  # what has changed since is made under another name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield


def _object(source: Path, flags: list[str]) -> Path:
    """The object of one source, compiled if it, its headers or the flags have changed."""
    name = f"{source.parent.name}-{source.stem}{source.suffix.replace('.', '-')}"
    known = BUILD / f"{name}-{_digest([str(source), *flags], [])}.headers"
    if known.is_file():  # what the last compilation read
        inputs = [Path(line) for line in known.read_text(encoding="utf-8").split("\n")]
        found = BUILD / f"{name}-{_digest(flags, inputs)}.o"
        if found.is_file():
            return found
    made = BUILD / f"{name}-{os.getpid()}.o.new"
    for _ in range(5):
        started = time.time_ns()
        _run([str(compiler()), *flags, "-MMD", "-x", "c++", "-c", str(source), "-o", str(made)])
        rule = made.with_suffix(".d")
        words = rule.read_text(encoding="utf-8").replace("\\\n", " ").split()[1:]
        rule.unlink()
        inputs = [Path(word) for word in words if str(ROOT) in word]
        digest = _digest(flags, inputs)
        if all(path.stat().st_mtime_ns < started for path in inputs):
            break  # else somebody wrote to one meanwhile, and the object may be of the old text
    found = BUILD / f"{name}-{digest}.o"
    made.replace(found)
    known.write_text("\n".join(map(str, inputs)), encoding="utf-8")
    return found


def _collect(futures: Sequence[Future[Path]]) -> list[Path]:
    """The results, or one error with what the compiler said about every file."""
    said = [str(e) for f in futures if (e := f.exception()) is not None]
    if said:
        raise BuildError("\n".join(said))
    return [f.result() for f in futures]


def _link(sources: list[Path], kind: list[str], shared: bool, name: str) -> Path:
    if compiler() is None:
        raise BuildError("g++ was not found: the emulated device needs it (Linux)")
    flags = [*FLAGS, *kind]
    fast = [*flags, "-O2"]  # the emulator itself, which nobody steps through
    with _alone():
        with ThreadPoolExecutor(COMPILERS) as pool:
            objects = _collect(
                [
                    pool.submit(_object, source, fast if source.parent == EMULATOR else flags)
                    for source in sources
                ]
            )
        link = [f"-Wl,-T,{EMULATOR / 'shared.ld'}", "-ldl"]
        if shared:
            link += ["-shared", f"-Wl,--version-script={EMULATOR / 'exports.map'}"]
            link += [] if "-fsanitize=address,undefined" in kind else ["-Wl,--no-undefined"]
        scripts = [EMULATOR / "shared.ld", EMULATOR / "exports.map"]
        folder = BUILD / _digest([*flags, *link, name, *map(str, objects)], scripts)
        result = folder / name
        if not result.is_file():
            folder.mkdir(exist_ok=True)
            made = folder / f"{name}.new"
            _run([str(compiler()), *flags, *map(str, objects), *link, "-o", str(made)])
            made.replace(result)
    return result


def _emulator() -> list[Path]:
    return sorted(EMULATOR.glob("*.cpp"))


def emulated_library(sanitize: bool | None = None) -> Path:
    """libvcuda on the emulated runtime; exports vcuda_* and fake_* (native/tests/emu/fake.h).

    sanitize: with AddressSanitizer and UBSan, for a process that has them preloaded; None: when
    VCUDA_SANITIZE=1 is in the environment.
    """
    if sanitize is None:
        sanitize = os.environ.get("VCUDA_SANITIZE") == "1"
    sources = [*NATIVE.glob("src/*.cpp"), *NATIVE.glob("src/*.cu"), *NATIVE.glob("kernels/*.cu")]
    kind = SANITIZE if sanitize else PLAIN
    return _link(sorted(sources) + _emulator(), kind, True, "libvcuda.so")


def build_program(sources: Sequence[str | Path], sanitize: bool = False) -> Path:
    """A program of these sources (absolute, or relative to the repository) and the emulator."""
    paths = [ROOT / source for source in sources]
    error = NATIVE / "src/error.cpp"
    needed = [*paths, *([] if error in paths else [error]), *_emulator()]
    return _link(needed, SANITIZE if sanitize else PLAIN, False, paths[0].stem)


def sanitized_environment() -> dict[str, str]:
    """What a process needs to load the sanitized library, or to run a sanitized program.

    The sanitizers must be there before everything else, so Python gets them preloaded; its own
    memory is taken from malloc so that they see it, and it leaks by design.
    """
    preload = [
        _run([str(compiler()), f"-print-file-name={name}"]).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "LD_PRELOAD": " ".join(preload),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main(arguments: list[str]) -> int:
    sanitize = "--sanitize" in arguments
    sources = [a for a in arguments if not a.startswith("--")]
    try:
        result = build_program(sources, sanitize) if sources else emulated_library(sanitize)
    except BuildError as e:
        print(e, file=sys.stderr)
        return 1
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
