#!/usr/bin/env python3
"""Set up and run pykestrel from a fresh clone, with nothing but Python 3.10 or newer.

    python3 tools/dev.py run [ARGS...]    run the demo model (ARGS as for `pykestrel run`)
    python3 tools/dev.py test [ARGS...]   every check and test (ARGS as for pytest)
    python3 tools/dev.py exec CMD...      a command inside the environment, e.g. `exec pykestrel`
    python3 tools/dev.py setup            the environment alone

The environment is .venv beside this folder. It is made on the first call, refreshed when
pyproject.toml or the native sources change, and reused otherwise.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# First of all, and in words an old Python understands: what follows it does not.
if sys.version_info < (3, 10):
    sys.exit("dev: Python 3.10 or newer is needed, this is " + sys.version.split()[0])

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
EXE = ".exe" if os.name == "nt" else ""
PYTHON = BIN / f"python{EXE}"
STAMP = VENV / "pykestrel-stamp"
DEMO_PROMPT = "In two sentences, what is a kestrel?"


class Stop(Exception):
    """A one-line message that ends the script with status 1."""


def say(text: str) -> None:
    """One line of progress on stderr: stdout is the command's own."""
    print(f"dev: {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------- environment


def digest(paths: list[Path]) -> str:
    """Hash of the names and bytes of some files."""
    sha = hashlib.sha256()
    for path in sorted(paths):
        sha.update(f"{path.relative_to(ROOT)}\0".encode())
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def wanted_stamp(extras: str) -> str:
    """What the environment depends on; another value means it is to be made anew or refreshed."""
    native = [p for p in (ROOT / "native").rglob("*") if p.is_file() and "tests" not in p.parts]
    keys = ("PYKESTREL_CUDA", "PYKESTREL_PIP_CUDA", "CUDAARCHS", "CUDACXX")
    settings = {key: os.environ.get(key, "") for key in keys}
    return "\n".join(
        [
            f"python {sys.version_info[0]}.{sys.version_info[1]} {sys.base_prefix}",
            f"project {digest([ROOT / 'pyproject.toml'])}",
            f"native {digest([ROOT / 'CMakeLists.txt', *native])} {settings}",
            f"extras {extras}",
        ]
    )


def call(command: Sequence[object], what: str) -> None:
    """Run a quiet set-up step; its output is shown only when it fails."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return
    text = done.stdout.lower()
    if "ensurepip" in text:
        hint = "Python's venv module is not complete here; on Debian: apt-get install python3-venv"
    elif "no space left" in text:
        hint = "the disk is full"
    elif "connection" in text or "could not find a version" in text or "resolution" in text:
        hint = "the package index could not be reached, or lacks a package; is there a network?"
    else:
        print(done.stdout.rstrip(), file=sys.stderr)
        raise Stop(f"{what} failed; the reason stands above")
    log = ROOT / "build" / "setup.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text(done.stdout, encoding="utf-8")
    raise Stop(f"{what} failed: {hint} (all of it: {log.relative_to(ROOT)})")


def make_venv() -> None:
    try:
        import venv  # noqa: F401  # Debian may leave it out
    except ImportError:
        raise Stop(
            "this Python has no venv module; on Debian: apt-get install python3-venv"
        ) from None
    if VENV.exists():
        shutil.rmtree(VENV)
    say(f"making {VENV.name} with Python {sys.version.split()[0]}")
    call([sys.executable, "-m", "venv", VENV], "making the environment")


def setup(extras: str) -> None:
    """Have the environment ready: quick when nothing has changed."""
    stamp = wanted_stamp(extras)
    have = STAMP.read_text(encoding="utf-8") if STAMP.is_file() else ""
    if have == stamp and PYTHON.exists():
        return
    # more extras than asked for are no reason to install again
    if "extras dev" in have and have.replace("extras dev", f"extras {extras}") == stamp:
        return
    start = time.monotonic()
    try:
        if not PYTHON.exists() or have.split("\n")[0] != stamp.split("\n")[0]:
            make_venv()
        STAMP.unlink(missing_ok=True)
        if os.environ.get("PYKESTREL_PIP_CUDA"):  # that nvcc lies elsewhere every time
            shutil.rmtree(ROOT / "build" / "editable", ignore_errors=True)
        say(f"installing pykestrel with its {extras} packages")
        # -q -q: warnings of an index's mirrors are not about us
        call(
            [PYTHON, "-m", "pip", "install", "-q", "-q", "--disable-pip-version-check"]
            + ["--editable", f".[{extras}]"],
            "installing pykestrel",
        )
    except OSError as e:
        raise Stop(f"the environment {VENV} cannot be made: {e}") from None
    STAMP.write_text(stamp, encoding="utf-8")
    say(f"ready after {time.monotonic() - start:.0f} s; {cuda_line()}")


def cuda_line() -> str:
    """Whether the CUDA library was built, or the reason that the build left behind."""
    code = "from pykestrel import native; r = native.find(); print(r.path and 'ok' or r.error)"
    done = subprocess.run(
        [str(PYTHON), "-c", code],
        cwd=VENV,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    text = done.stdout.strip() or done.stderr.strip().rsplit("\n", 1)[-1]
    return "the CUDA library is built" if text == "ok" else text


def environment() -> dict[str, str]:
    env = dict(os.environ)
    env["VIRTUAL_ENV"] = str(VENV)
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
    env.pop("PYTHONHOME", None)
    return env


def run(command: list[str]) -> int:
    """Run a command inside the environment, in the caller's terminal and folder."""
    try:
        return subprocess.run(command, env=environment(), check=False).returncode
    except KeyboardInterrupt:
        return 130
    except OSError as e:
        raise Stop(f"{command[0]} cannot be run: {e}") from None


# ------------------------------------------------------------------------------------- commands


def command_run(args: list[str]) -> int:
    setup("gguf,hub,cpu")
    # --yes: the demo model is fetched without a question, once
    defaults = ["--yes"] if args else ["--yes", "--prompt", DEMO_PROMPT]
    return run([str(BIN / f"pykestrel{EXE}"), "run", *defaults, *args])


def sources() -> list[str]:
    """Our C, C++ and CUDA files."""
    kinds = {".h", ".c", ".cpp", ".cu", ".cuh"}
    return sorted(
        str(p.relative_to(ROOT))
        for top in ("native", "tools")
        for p in (ROOT / top).rglob("*")
        if p.suffix in kinds
    )


def command_test(args: list[str]) -> int:
    os.chdir(ROOT)
    setup("dev")
    python = str(PYTHON)
    checks = {
        "ruff": [python, "-m", "ruff", "check", "--quiet", "."],
        "clang-format": [str(BIN / f"clang-format{EXE}"), "--dry-run", "-Werror", *sources()],
        "mypy": [python, "-m", "mypy"],
    }
    failed = []
    for name, command in checks.items():
        start = time.monotonic()
        status = run(command)
        say(f"{name}: {'ok' if status == 0 else 'FAILED'} ({time.monotonic() - start:.1f} s)")
        if status == 130:
            return status
        if status != 0:
            failed.append(name)
    if failed:  # before the tests, so that their summary is the last line
        say(f"failed before the tests: {', '.join(failed)}")
    status = run([python, "-m", "pytest", *args])
    return status or (1 if failed else 0)


def command_exec(args: list[str]) -> int:
    if not args:
        raise Stop("exec needs a command: python3 tools/dev.py exec pykestrel doctor")
    setup("dev")
    inside = shutil.which(args[0], path=str(BIN))
    return run([inside or args[0], *args[1:]])


def command_setup(args: list[str]) -> int:
    setup("dev")
    say(f"the environment is {VENV}")
    return 0


COMMANDS = {
    "run": command_run,
    "test": command_test,
    "exec": command_exec,
    "setup": command_setup,
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        raise Stop(f"there is no command '{argv[0]}'; the commands are {', '.join(COMMANDS)}")
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Stop as stop:
        say(str(stop))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
