"""The build: what a wheel holds with and without nvcc, the architectures, the dev script."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import pykestrel

from .conftest import NATIVE, ROOT, run

DEV = ROOT / "tools/dev.py"


@pytest.fixture(scope="session")
def cmake() -> str:
    found = shutil.which("cmake")
    if not found:
        pytest.skip("needs cmake")
    return found


# ---------------------------------------------------------------------------------- CMake alone


@pytest.fixture
def configure(cmake: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
        keep = {k: v for k, v in os.environ.items() if k not in ("CUDACXX", "PYKESTREL_CUDA")}
        return run([cmake, "-S", ROOT, "-B", tmp_path / "build", *flags], env={**keep, **env})

    return call


NO_NVCC = "-DPYKESTREL_NVCC="  # what find_program would have filled in


def test_without_nvcc_the_build_says_so(
    configure: Callable[..., subprocess.CompletedProcess[str]], cmake: str, tmp_path: Path
) -> None:
    done = configure(NO_NVCC)
    assert done.returncode == 0, done.stderr
    assert "CUDA support was left out of this build: nvcc was not found" in done.stderr
    assert "install the CUDA toolkit" in re.sub(r"\s+", " ", done.stderr)
    prefix = tmp_path / "out"
    done = run(
        [cmake, "--install", tmp_path / "build", "--prefix", prefix, "--component", "python"]
    )
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (prefix / "pykestrel/_lib").iterdir()] == ["left_out.txt"]


def test_on_without_nvcc_fails(
    configure: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = configure(NO_NVCC, "-DPYKESTREL_CUDA=ON")
    assert done.returncode != 0
    assert "PYKESTREL_CUDA=ON, but nvcc was not found" in done.stderr


def test_broken_nvcc_fails_and_is_not_left_out(
    configure: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = configure(CUDACXX="/nonexistent/nvcc")
    assert done.returncode != 0
    assert "/nonexistent/nvcc" in done.stderr


def test_unknown_switch_is_refused(
    configure: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = configure(PYKESTREL_CUDA="maybe")
    assert done.returncode != 0
    assert "must be AUTO, ON or OFF" in done.stderr


@pytest.mark.parametrize(
    ("known", "release", "cudaarchs", "archs"),
    [
        (
            "80 86 87 89 90 100 103 110 120 121",
            1,
            "",
            "80-real;86-real;89-real;90a-real;100-real;120",
        ),
        ("75 80 86 87 89 90", 1, "", "80-real;86-real;89-real;90a-real;90-virtual"),
        ("80 90 100 120", 1, "90a", "90a"),
        ("80 90 100 120", 0, "90a-real", "90a-real"),
    ],
)
def test_architectures(
    cmake: str, tmp_path: Path, known: str, release: int, cudaarchs: str, archs: str
) -> None:
    nvcc = tmp_path / "nvcc"
    lines = "\n".join(f"echo compute_{arch}" for arch in known.split())
    nvcc.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    nvcc.chmod(0o755)
    script = tmp_path / "archs.cmake"
    script.write_text(
        f'include("{NATIVE}/cmake/Archs.cmake")\n'
        f'choose_archs("{nvcc}" {release})\n'
        'message("${CMAKE_CUDA_ARCHITECTURES}")\n',
        encoding="utf-8",
    )
    done = run([cmake, "-P", script], env={**os.environ, "CUDAARCHS": cudaarchs})
    assert done.stderr.strip() == archs


def test_development_build_has_one_architecture(cmake: str, tmp_path: Path) -> None:
    script = tmp_path / "archs.cmake"
    script.write_text(
        f'include("{NATIVE}/cmake/Archs.cmake")\nchoose_archs(nvcc 0)\n'
        'message("${CMAKE_CUDA_ARCHITECTURES}")\n',
        encoding="utf-8",
    )
    env = {k: v for k, v in os.environ.items() if k != "CUDAARCHS"}
    assert re.fullmatch(r"\d+a?-real", run([cmake, "-P", script], env=env).stderr.strip())


# --------------------------------------------------------------------------------------- wheels


def build_wheel(folder: Path, **env: str) -> Path:
    done = run(
        [sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "-q", "-w", folder]
        # a build folder of its own: what a test sets must not stay in the cache of the next build
        + ["--disable-pip-version-check", f"--config-settings=build-dir={folder / 'build'}"],
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def in_wheel(wheel: Path, folder: Path, code: str) -> str:
    """Run code with the wheel's package, not the work tree's, and the installed dependencies."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    paths = [str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    # -S: no .pth file is read, so that an editable install does not come first
    done = run(
        [sys.executable, "-S", "-c", code],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if k != "PYKESTREL_LIB"},
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IN_WHEEL = """
import pykestrel
from pathlib import Path
assert Path(pykestrel.__file__).parent.parent == Path.cwd(), pykestrel.__file__
from pykestrel import doctor, native
report = doctor.report()
print(doctor.render(report))
print("exit", doctor.exit_code(report), native.find().path, native.find().error)
"""


def check_contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert f"\nVersion: {pykestrel.__version__}\n" in metadata
    assert "pykestrel/py.typed" in names
    assert any(n.endswith("entry_points.txt") for n in names)
    assert any(n.endswith("licenses/LICENSE") for n in names)
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "pykestrel").rglob("*.py")}
    assert modules <= names
    rest = {n for n in names if not n.startswith("pykestrel/") and ".dist-info/" not in n}
    assert not rest, "only the package goes into a wheel"
    return names


@pytest.mark.slow
def test_wheel_with_cuda_off(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, PYKESTREL_CUDA="OFF")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any("_lib" in n for n in check_contents(wheel))
    out = in_wheel(wheel, tmp_path / "x", IN_WHEEL)
    assert "exit 0 None the CUDA library is not installed" in out


@pytest.mark.slow
def test_wheel_without_nvcc(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CMAKE_ARGS=NO_NVCC)
    assert "pykestrel/_lib/left_out.txt" in check_contents(wheel)
    out = in_wheel(wheel, tmp_path / "x", IN_WHEEL)
    assert "exit 0 None CUDA support was left out of this build: nvcc was not found" in out


@pytest.mark.slow
def test_wheel_with_cuda(tmp_path: Path) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    wheel = build_wheel(tmp_path, PYKESTREL_CUDA="ON", CUDAARCHS="90a-real")
    names = check_contents(wheel)
    assert re.search(r"-py3-none-(linux|win|manylinux)", wheel.name)
    assert {"pykestrel/_lib/libvcuda.so", "pykestrel/_lib/vcuda.h"} <= names
    assert wheel.stat().st_size < 100e6
    assert "libvcuda.so None" in in_wheel(wheel, tmp_path / "x", IN_WHEEL)


# -------------------------------------------------------------------------------- tools/dev.py


def test_dev_script_help_and_errors() -> None:
    done = run([sys.executable, DEV, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "tools/dev.py run" in done.stdout
    assert run([sys.executable, DEV]).returncode == 2
    done = run([sys.executable, DEV, "walk"])
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "dev: there is no command 'walk'; the commands are run, test, exec, setup\n"
    )


def test_dev_script_names_the_python_it_needs() -> None:
    code = (
        "import runpy, sys; sys.version_info = (3, 6, 1); sys.version = '3.6.1 (x)'; "
        f"runpy.run_path({str(DEV)!r}, run_name='__main__')"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 1
    assert done.stderr == "dev: Python 3.10 or newer is needed, this is 3.6.1\n"
    ast.parse(DEV.read_text(encoding="utf-8"), feature_version=(3, 6))


def test_dev_script_needs_the_standard_library_alone() -> None:
    done = run([sys.executable, "-I", "-S", DEV, "--help"])
    assert done.returncode == 0, done.stderr


def test_ci_runs_the_test_command() -> None:
    text = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert text.rstrip().endswith("python3 tools/dev.py test")
    assert os.access(ROOT / ".ci/run", os.X_OK)
