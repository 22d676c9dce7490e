"""What is on this machine, and what would run: `report` gathers it, `render` shows it.

The report is plain JSON data. ``report()["ok"]`` is False only for a broken installation (a library
that is there and cannot be loaded, a required package that cannot be imported); a machine that can
only use its CPU is in order.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import __version__, machine, native
from .errors import KestrelError, NativeError
from .files import cache_dir, hub_cache_dir
from .units import plural, show_bytes

# distribution -> module
REQUIRED = {
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "rich": "rich",
    "prompt_toolkit": "prompt_toolkit",
}
# distribution -> (extra, what it is for)
OPTIONAL = {
    "gguf": ("gguf", "to load .gguf files"),
    "huggingface_hub": ("hub", "to pull models from the hub"),
    "threadpoolctl": ("cpu", "to see which BLAS kernel NumPy runs, and to set its threads"),
}
OWN_VARIABLES = ("PYKESTREL_CACHE", "PYKESTREL_LIB", "PYKESTREL_PROF")  # no flag's
ENVIRONMENT = (
    "PYKESTREL_",
    "OPENBLAS_",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)


def report(variables: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """Everything that `render` shows, as JSON data. Never raises for what it finds.

    variables: the PYKESTREL_ variables that are read (None), and advice for some that are not; any
    other that is set is reported as unknown. Without it none is.
    """
    packages, import_errors = _packages()
    library = _library()
    gpus, gpu_reason = _gpus(library)
    numpy = None if "numpy" in import_errors else machine.numpy_blas()
    result: dict[str, Any] = {
        "pykestrel": {"version": __version__, "path": str(Path(__file__).parent)},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "processor": machine.cpuinfo().get("model name") or platform.processor() or "unknown",
            "cores": machine.cores(),
            "load": _load(),
        },
        "memory": machine.memory(),
        "packages": packages,
        "import_errors": import_errors,
        "numpy": numpy,
        "library": library,
        "driver": _driver(library),
        "gpus": gpus,
        "gpu_reason": gpu_reason,
        "caches": _caches(),
        "environment": _environment(),
        "unknown_variables": {} if variables is None else _unknown(variables),
    }
    result.update(_conclusion(result))
    return result


def _load() -> float | None:
    """The load average of the last minute; None where the system has none."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def _unknown(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Variables of our prefix that nothing reads, each with what to do."""
    known = [name for name, advice in variables.items() if advice is None] + [*OWN_VARIABLES]
    found: dict[str, str] = {}
    for name in sorted(os.environ):
        if not name.startswith("PYKESTREL_") or name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        hint = variables.get(name) or (f"did you mean {near[0]}?" if near else "no flag has it")
        found[name] = f"not read: {hint}"
    return found


def _environment() -> dict[str, str]:
    """The variables that change what runs; the values of keys and tokens stay private."""
    return {
        key: "(set)" if key.endswith(("KEY", "TOKEN")) else value
        for key, value in sorted(os.environ.items())
        if key.startswith(ENVIRONMENT)
    }


def exit_code(result: dict[str, Any]) -> int:
    """0, also when only the CPU can be used; 1 for a broken installation."""
    return 0 if result["ok"] else 1


# ------------------------------------------------------------------------------- Python packages


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> tuple[dict[str, str | None], dict[str, str]]:
    """Versions of what is installed, and why a required package cannot be imported."""
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    errors: dict[str, str] = {}
    for distribution, module in REQUIRED.items():
        try:
            importlib.import_module(module)
        except Exception as e:  # whatever a broken package raises is the finding
            errors[distribution] = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
    return versions, errors


# ------------------------------------------------------------------------- library, driver, GPUs


def _library() -> dict[str, Any]:
    found = native.find()
    result: dict[str, Any] = {
        "found": found.library is not None,
        "path": str(found.path) if found.path else None,
        "attempts": [{"path": str(a.path), "outcome": a.outcome} for a in found.attempts],
        "error": found.error,
        "broken": found.broken,
        "left_out": found.left_out,
        "abi": None,
        "abi_needed": native.ABI_VERSION,
        "build": None,
    }
    if found.library is not None:
        result["abi"] = native.abi_version()
        result["build"] = native.build_info()
    return result


def _cuda_version(number: int) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _driver(library: dict[str, Any]) -> dict[str, Any]:
    """The NVIDIA driver's own version, its newest CUDA, and the CUDA runtime in the library."""
    result: dict[str, Any] = {"version": machine.nvidia_driver(), "cuda": None, "runtime": None}
    if library["found"]:
        try:
            driver, runtime = native.driver_version()
            result.update(cuda=_cuda_version(driver), runtime=_cuda_version(runtime))
        except NativeError as e:
            result["error"] = str(e)
    return result


def _gpus(library: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The GPUs with a self-test each, and one sentence about them."""
    if not library["found"]:
        return [], str(library["error"])
    state = native.state()
    gpus: list[dict[str, Any]] = []
    for index in range(state.devices):
        entry: dict[str, Any] = {"index": index, "usable": False}
        try:
            entry.update(dataclasses.asdict(native.dev_query(index)))
            with native.create(index) as handle:
                native.dev_selftest(handle)  # the first launch loads the code; the second is timed
                start = time.perf_counter()
                native.dev_selftest(handle)
                entry["selftest_ms"] = round((time.perf_counter() - start) * 1e3, 3)
            entry["usable"] = True
        except NativeError as e:
            entry["error"] = str(e)
        gpus.append(entry)
    return gpus, state.reason


# ---------------------------------------------------------------------------------------- caches


def _caches() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, locate in (("pykestrel", cache_dir), ("hub", hub_cache_dir)):
        try:
            path = locate()
        except KestrelError as e:
            result[name] = {"error": str(e)}
            continue
        parent = next((p for p in (path, *path.parents) if p.exists()), path)
        entry: dict[str, Any] = {
            "path": str(path),
            "exists": path.is_dir(),
            "writable": os.access(parent, os.W_OK | os.X_OK),
        }
        if name == "pykestrel" and entry["exists"]:
            entry["bytes"] = _bytes_below(path)
        result[name] = entry
    return result


def _bytes_below(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for file in names:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except OSError:
                continue  # removed meanwhile
    return total


# ------------------------------------------------------------------------------------- one model


def model_report(name: str, quant: str | None, ctx_size: int | None, kv: str) -> dict[str, Any]:
    """Whether a model would have room here, from its headers: ``fits`` is the line to show. What
    is wrong with the model is the answer, and nothing of the installation."""
    from .arguments import check_ctx
    from .loading import read_config, resolve_model
    from .loading.quantized import check_stored, stored_quant
    from .prediction import predict

    try:
        source = resolve_model(name)
        config = read_config(source)
        stored = stored_quant(source)
        check_stored(source, stored, quant)
        kind = quant or (stored.kind if stored is not None else "q8")
        fate = predict(
            config, kind, check_ctx(ctx_size, config), kv, fixed_quant=stored is not None
        )
    except KestrelError as e:
        return {"name": name, "error": str(e), "fits": f"not known: {e}", "prediction": None}
    return {"name": name, "error": None, "fits": fate.line(), "prediction": fate.facts()}


# ------------------------------------------------------------------------------------ conclusion


def _conclusion(result: dict[str, Any]) -> dict[str, Any]:
    """``ok``, ``engine`` ("cpu" | "cuda" | "none") and the one line ``conclusion``."""
    if result["import_errors"]:
        name, error = next(iter(result["import_errors"].items()))
        return {
            "ok": False,
            "engine": "none",
            "conclusion": f"nothing runs: {name} cannot be imported ({error}); "
            f"install it again: pip install --force-reinstall {name}",
        }
    cores = plural(result["platform"]["cores"], "core")
    cpu = f"the CPU ({_blas_words(result['numpy'])}, {cores})"
    library = result["library"]
    if library["broken"]:
        return {
            "ok": False,
            "engine": "cpu",
            "conclusion": f"models run on {cpu}, and the CUDA library is broken: "
            f"{library['error']}",
        }
    usable = [gpu for gpu in result["gpus"] if gpu["usable"]]
    if usable:
        return {
            "ok": True,
            "engine": "cuda",
            "conclusion": f"models run on the GPU ({usable[0]['name']})",
        }
    if result["gpus"]:
        why = result["gpus"][0].get("error", "no GPU can be used")
    else:
        why = result["gpu_reason"]
    return {"ok": True, "engine": "cpu", "conclusion": f"models run on {cpu}: {why}"}


def _blas_words(numpy: dict[str, Any]) -> str:
    blas = numpy["blas"]
    words = [f"NumPy {numpy['version']}"]
    if blas.get("name"):
        words.append(" ".join(str(blas[k]) for k in ("name", "kernel") if blas.get(k)))
    return " with ".join(words)


# -------------------------------------------------------------------------------------- the text


def _size(count: int | None) -> str:
    return "unknown" if count is None else show_bytes(count)


def render(result: dict[str, Any]) -> str:
    """The report as text: ``label  value`` lines, the conclusion last. ASCII, no colour."""
    lines: list[tuple[str, str]] = []
    where = result["platform"]
    lines.append(("pykestrel", f"{result['pykestrel']['version']}  {result['pykestrel']['path']}"))
    lines.append(("Python", f"{result['python']['version']}  {result['python']['executable']}"))
    lines.append(("platform", where["system"]))
    lines.append(("processor", f"{where['processor']}, {plural(where['cores'], 'core')}"))
    if where["load"] is not None and where["load"] > where["cores"]:
        busy = f"note: BUSY, load average {where['load']} on {plural(where['cores'], 'core')}: "
        busy += "fewer threads than cores may be many times faster (--threads)"
        lines.append(("processor", busy))
    mem = result["memory"]
    lines.append(("memory", f"{_size(mem['total'])}, {_size(mem['available'])} available"))
    lines += _render_packages(result)
    lines += _render_library(result)
    for gpu in result["gpus"]:
        lines += _render_gpu(gpu)
    if not result["gpus"]:
        lines.append(
            (
                "GPU",
                f"none: {result['gpu_reason']}"
                if result["library"]["found"]
                else "not looked for without the library",
            )
        )
    for name, cache in result["caches"].items():
        if "error" in cache:
            lines.append((f"{name} cache", cache["error"]))
            continue
        state = _size(cache["bytes"]) if "bytes" in cache else ""
        state = state or ("there" if cache["exists"] else "not there yet")
        state += "" if cache["writable"] else ", NOT WRITABLE"
        lines.append((f"{name} cache", f"{cache['path']}  ({state})"))
    if "model" in result:
        lines.append(("model", result["model"]["name"]))
        lines.append(("fits", result["model"]["fits"]))
    for key, value in result["environment"].items():
        mark = result["unknown_variables"].get(key)
        lines.append(("environment", f"{key}={value}" + (f"  ({mark})" if mark else "")))

    width = max(len(label) for label, _ in lines)
    shown: list[str] = []
    last = ""
    for label, text in lines:
        shown.append(f"{'' if label == last else label:<{width}}  {text}".rstrip())
        last = label
    verdict = result["conclusion"]
    return "\n".join([*shown, "", verdict[:1].upper() + verdict[1:]])


def _render_packages(result: dict[str, Any]) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    numpy = result["numpy"]
    if numpy:
        blas = numpy["blas"]
        text = f"{numpy['version']}, {blas.get('name') or 'unknown BLAS'}"
        text += f" {blas['version']}" if blas.get("version") else ""
        text += f", {blas['kernel']} kernel" if blas.get("kernel") else ""
        text += f", {plural(blas['threads'], 'thread')}" if blas.get("threads") else ""
        lines.append(("NumPy", text))
        if numpy["note"]:
            lines.append(("NumPy", f"note: {numpy['note']}"))
    versions = result["packages"]
    rest = [f"{name} {versions[name]}" for name in REQUIRED if name != "numpy" and versions[name]]
    lines.append(("packages", ", ".join(rest) or "none"))
    for name, error in result["import_errors"].items():
        lines.append(("packages", f"{name} cannot be imported: {error}"))
    for name, (extra, purpose) in OPTIONAL.items():
        missing = f'not installed ({purpose}: pip install "pykestrel[{extra}]")'
        lines.append(("optional", f"{name} {versions[name] or missing}"))
    return lines


def _render_library(result: dict[str, Any]) -> list[tuple[str, str]]:
    library = result["library"]
    texts = [f"{attempt['path']}: {attempt['outcome']}" for attempt in library["attempts"]]
    if not library["found"] and (library["left_out"] or not library["attempts"]):
        texts.append(library["error"])
    build, own = library["build"], result["pykestrel"]["version"]
    if build:
        toolkit = f"CUDA {build['cuda_toolkit']} for {build['archs']}"
        texts.append(
            f"version {build['version']}, ABI {library['abi']}, {toolkit}, {build['build_type']}"
        )
        if build["version"] != own:
            other = build["version"]
            texts.append(f"note: it is of version {other}, the package of {own}; install again")
    driver = result["driver"]
    own_version = driver["version"]
    if driver["cuda"]:
        text = f"{own_version or 'version unknown'}, CUDA {driver['cuda']}"
    else:
        text = own_version or "none found"
    return [*(("CUDA library", t) for t in texts), ("NVIDIA driver", text)]


def _render_gpu(gpu: dict[str, Any]) -> list[tuple[str, str]]:
    texts: list[str] = []
    if "name" in gpu:
        code = f"sm_{gpu['kernel_arch']} code" if gpu["kernel_arch"] else "NO CODE for it"
        capability = f"compute capability {gpu['cc_major']}.{gpu['cc_minor']}"
        texts.append(f"{gpu['name']}, {capability}, {gpu['sm_count']} SMs, {code}")
        sizes = f"{_size(gpu['memory_free'])} free of {_size(gpu['memory_total'])}"
        peak = f"peak {gpu['peak_bytes_per_second'] / 1e9:,.0f} GB/s"
        texts.append(f"{sizes}, L2 {_size(gpu['l2_bytes'])}, {peak}, PCI {gpu['pci']}")
    if "selftest_ms" in gpu:
        texts.append(f"self-test passed in {gpu['selftest_ms']} ms")
    if "error" in gpu:
        texts.append(gpu["error"])
    return [(f"GPU {gpu['index']}", text) for text in texts]
