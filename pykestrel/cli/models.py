"""Opening a model for a command: which one, with a progress bar and what came of it, and the demo
model."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import KestrelError, UsageError
from ..meter import LoadMeter
from ..units import plural, show_bytes
from .options import exclude
from .terminal import Terminal

if TYPE_CHECKING:
    from ..engine import Engine
    from ..model import Model


def model_name(args: Namespace, terminal: Terminal, *, demo: str = "no") -> str:
    """What ``--model`` says; without it the demo model as far as ``demo`` allows.

    demo: "no"; "pulled": only if it is in the cache; "offer": it is fetched once, after a question
    on a terminal, with --yes without one. A script that neither names a model nor says --yes must
    not download 98 MB unasked.
    """
    if args.model:
        return str(args.model)
    if demo == "no":
        raise UsageError("no model given; name one with --model (or PYKESTREL_MODEL)")
    from ..pull import CATALOG, DEMO, demo_path

    path = demo_path()
    if path is not None:
        if terminal.verbose or not sys.stderr.isatty():
            terminal.note(f"no --model given: using the demo model {DEMO} ({path})")
        return DEMO
    entry = CATALOG[DEMO]
    offer = f"the demo model {DEMO} ({show_bytes(entry.bytes)}, {entry.license})"
    if demo == "pulled":
        raise UsageError(
            f"no model given; name one with --model, or fetch {offer} with `pykestrel pull {DEMO}`"
        )
    if not args.yes:
        if not (terminal.interactive and sys.stderr.isatty()):
            raise UsageError(f"no model given; name one with --model, or fetch {offer} with --yes")
        if not terminal.ask(f"No model given. Fetch {offer}?"):
            raise UsageError("no model given; name one with --model")
    fetch(DEMO, terminal)
    return DEMO


def is_model(word: str) -> bool:
    """Whether a word names a model: one to pull, a .gguf file, a directory, a cached hub name."""
    from ..loading.source import resolve_model
    from ..pull import CATALOG

    if word.lower() in CATALOG or (word.endswith(".gguf") and not word.split()[1:]):
        return True
    try:
        resolve_model(word)
    except KestrelError:
        return False
    return True


def refuse_model_word(args: Namespace, word: str, otherwise: str) -> None:
    """`run smollm2-135m hi` means `-m smollm2-135m`, not a question about it to another model."""
    if "model" not in args.given and is_model(word):
        raise UsageError(f"did you mean -m {word}? {otherwise}")


def fetch(name: str, terminal: Terminal) -> str:
    """Pull a model with a progress bar; the path it can be loaded from."""
    from ..pull import check_name, pull, pulled_path

    check_name(name)
    here = pulled_path(name.lower())
    if here is not None:
        terminal.note(f"{name} is already in the cache:")
        return str(here)
    if not terminal.fancy_err:  # the bar says it better
        terminal.note(f"fetching {name} ...")
    with terminal.progress(f"fetching {name}") as report:
        path = pull(name, report)
    return str(path)


def open_model(
    args: Namespace,
    terminal: Terminal,
    *,
    name: str | None = None,
    quant: str | None = None,
    ctx_size: int | None = None,
    cpu_cache: int | None = None,
) -> Model:
    """Load the model that the flags name; keyword arguments replace flags."""
    from ..model import load

    name = name or model_name(args, terminal)
    template = getattr(args, "chat_template", None)
    kind = quant or args.quant
    meter = LoadMeter()
    title = f"loading {name}" + (f" as {kind}" if kind else "")
    beside = partial(_weights, meter)
    if args.device == "cpu":
        why = "--vram-budget is of a GPU: it excludes --cpu and PYKESTREL_DEVICE=cpu"
        exclude(args, "device", ("vram_budget",), why)
    if args.vram_budget is None:  # variables that say how a part is used are not for this run
        for option in {"offload", "min_flop"} - args.given:
            setattr(args, option, None)
    with terminal.progress(title, beside=beside) as report:
        model = load(
            name,
            device=args.device or "auto",
            quant=kind,
            ctx_size=args.ctx_size if ctx_size is None else ctx_size,
            kv=args.kv or "int8",
            cpu_cache=args.cpu_cache if cpu_cache is None else cpu_cache,
            chat_template=None if template is None else Path(template),
            progress=report,
            threads=args.threads,
            prefill=args.prefill or "auto",
            verify=args.verify,
            vram_budget=args.vram_budget,
            host_budget=args.host_budget,
            min_flop=args.min_flop,
            offload=args.offload or "segments",
            meter=meter,
        )
    tell_residency(terminal, meter, model.session.engine, chosen=cpu_cache or args.cpu_cache)
    terminal.detail(
        f"{model.name}: {model.quant}, context {model.ctx_size}, K/V {model.kv}, "
        f"on {model.engine.name}{_part(model)}\n{split_line(model.load_s, meter)}"
    )
    return model


def _part(model: Model) -> str:
    """Of a model that is in part on the GPU: what is there, and the gate."""
    stats: dict[str, int] = getattr(model.session.engine, "stats", dict)()
    if "min_flop" not in stats:
        return ""
    return f" ({model.engine.why}; --min-flop {stats['min_flop']})"


def _weights(meter: LoadMeter) -> str:
    return f"{meter.weights}/{meter.wanted} weights"


def split_line(load_s: float, meter: LoadMeter) -> str:
    """Where the seconds of loading went. The stages overlap, on several threads."""
    stages = f"read {meter.read_s:.2f} s, convert {meter.convert_s:.2f} s"
    if meter.resident is not None:
        stages += f", upload {meter.upload_s:.2f} s"
    threads = plural(meter.threads, "thread")
    return f"loaded in {load_s:.2f} s, weights {meter.wall_s:.2f} s; {threads} busy: {stages}"


def tell_residency(
    terminal: Terminal, meter: LoadMeter, engine: Engine, *, chosen: int | None = None
) -> None:
    """What lies on the device now; a warning when not all of the weights stay where they are
    fast. chosen: the user's own --cpu-cache, which is no reason to warn."""
    r = meter.resident
    stats: dict[str, int] = getattr(engine, "stats", dict)()
    if spilled := stats.get("spilled_bytes", 0):
        terminal.warn(
            f"{show_bytes(spilled)} of the CPU's weights lie in a file, which is slower: "
            f"--host-budget {stats['host_wanted']} keeps all in memory, at the cost of "
            f"{show_bytes(stats['host_wanted'])} of it"
        )
    if r is not None:
        weights, where = f"{r.entries}/{r.wanted} weights", "on the device"
        if not r.whole:
            weights, where = _weights(meter), f"in {r.entries} entries on the device"
        terminal.note(f"preload: {weights}, {show_bytes(r.bytes)} {where}, {meter.wall_s:.1f} s")
        if r.whole:
            rest = "computes the rest"
            if r.entries == r.wanted:
                rest = "runs the model, as its embedding or a little more has no room there"
            terminal.warn(
                f"{r.entries} of {r.wanted} weights are on the GPU and the CPU {rest}: "
                f"--vram-budget {r.whole} keeps all of them there, at the cost of "
                f"{show_bytes(r.whole)} of its memory and room for K/V"
            )
        elif not r.complete:
            terminal.warn(
                f"only {r.entries} of {r.wanted} entries of weights stay on the device "
                f"({r.evictions} were dropped for room), and nothing runs without all of them: "
                "--quant q4 takes less at the cost of precision, --ctx-size less at the cost of "
                "context; or free memory on the device"
            )
        return
    wanted, kept = stats.get("wanted_bytes", 0), stats.get("expanded_bytes", 0)
    if kept < wanted:
        words = (
            f"{show_bytes(kept)} of {show_bytes(wanted)} of float32 copies of the weights stay in "
            f"memory: the rest is computed from the {show_bytes(stats['weights_bytes'])} of "
            f"weights, which is slower; --cpu-cache {gigabytes(wanted)} keeps all, at the cost of "
            "that much memory"
        )
        (terminal.warn if chosen is None else terminal.detail)(words)


def tell_verified(terminal: Terminal, engine: Engine) -> None:
    """With a part of the weights on a GPU: how many of its products were compared, and failed."""
    stats: dict[str, int] = getattr(engine, "stats", dict)()
    if "verified" not in stats:
        return
    if checked := stats["verified"]:
        failed = stats["verify_failures"]
        terminal.note(f"verified {plural(checked, 'product')} of the GPU: {failed} differ")
    else:
        terminal.warn(
            f"nothing was verified: the GPU computed no product ({stats['device_weights']} weights "
            f"are there, and products below --min-flop {stats['min_flop']} stay on the CPU)"
        )


def gigabytes(size: int) -> str:
    """A size as --cpu-cache takes it, rounded up: 1.3GB."""
    tenths = -(-size // 10**8)
    return f"{tenths // 10}.{tenths % 10}GB" if tenths % 10 else f"{tenths // 10}GB"
