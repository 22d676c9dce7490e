"""Directories of weights that pykestrel has quantised: how they are written and read back.

The format is described in docs/format.md. It is a Hugging Face directory whose safetensors files
hold ``<name>.codes`` and ``<name>.scales`` where the original holds the matrix ``<name>``, and
whose config.json says so in its quantization_config.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..config import ModelConfig
from ..errors import KestrelError, ModelError, UsageError
from ..files import atomic_dir, reason, write_error
from ..quant import GROUP, QTensor, n_groups
from ..weights import F32, Matrix
from .families import (
    HF_EXPERT,
    Piece,
    Plan,
    Target,
    canonical_name,
    expected_shapes,
    make_plan,
    some,
)
from .jsonfile import read_bytes, shown
from .load import (
    QUANTS,
    Jobs,
    Progress,
    Report,
    blocks,
    quantized_blocks,
    read_config,
    read_tensors,
    read_vector,
    run_jobs,
)
from .safetensors_file import INDEX, SINGLE
from .source import Source
from .tensors import TensorInfo, TensorTable, read_bf16, read_plain

VERSION = 1
SHARD_BYTES = 4_000_000_000  # data bytes of one file

# What else belongs to a model and is taken along, as it is.
_COMPANIONS = re.compile(
    r"(?i:tokenizer[\w.-]*\.(json|model)|(special_tokens_map|added_tokens|vocab|generation_config"
    r"|chat_template)\.json|merges\.txt|chat_template\.jinja|(licen[cs]e|notice|copying|use_policy)"
    r"([._-][\w.-]*)?)"
)
_WRITTEN = re.compile(r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))

Entry: TypeAlias = tuple[str, str, tuple[int, ...]]  # name, dtype, shape of a tensor in a file
_ITEM = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class StoredQuant:
    """The quantization_config of such a directory."""

    kind: str  # "q8" | "q4"


def stored_quant(source: Source) -> StoredQuant | None:
    """What a directory of `save_quantized` holds; None for any other model."""
    if source.kind != "dir":
        return None
    config = (source.read_json("config.json") or {}).get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != "pykestrel":
        return None
    where = f"{source.path / 'config.json'}: quantization_config"
    for key, wanted in (("version", (VERSION,)), ("group_size", (GROUP,)), ("kind", ("q8", "q4"))):
        got = config.get(key)
        if type(got) is not type(wanted[0]) or got not in wanted:
            raise ModelError(
                f"{where}: {key} is {shown(got)}; {' or '.join(map(str, wanted))} was wanted "
                "(a newer pykestrel may have written it)"
            )
    return StoredQuant(config["kind"])


def check_stored(source: Source, stored: StoredQuant | None, quant: str | None) -> None:
    """Refuse to load a quantised directory as another kind than it holds."""
    if stored is not None and quant not in (None, stored.kind):
        raise ModelError(
            f"{source.path} holds weights quantised as {stored.kind}, so they cannot be loaded "
            f"as {quant}; quantise the original model again, or ask for {stored.kind}"
        )


# ----- reading -----------------------------------------------------------------------------------


def quantized_plan(
    config: ModelConfig, table: TensorTable, path: Path, kind: str
) -> tuple[Plan, dict[str, tuple[TensorInfo, TensorInfo]]]:
    """The targets of a quantised directory and the (codes, scales) of each matrix by its name."""
    plan = Plan()
    pairs: dict[str, tuple[TensorInfo, TensorInfo]] = {}
    used: set[str] = set()

    def take(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        info = table.get(name)
        if info is None:
            raise ModelError(f"{path} does not hold {name}; the directory is incomplete")
        if info.shape != shape or info.dtype != dtype:
            raise ModelError(
                f"{info.path}: {name} is {info.dtype} {list(info.shape)}, but the configuration "
                f"wants {dtype} {list(shape)}; the two are not of the same model"
            )
        used.add(name)
        return info

    for layer, name, shape in expected_shapes(config):
        full = canonical_name(layer, name, len(shape) == 3)
        target = Target(layer, name, full, shape, ())
        if target.is_matrix:  # its two tensors are in the pairs
            (_, dtype, codes), (_, _, scales) = _pair(full, shape, kind)
            pairs[full] = (
                take(full + ".codes", dtype, codes),
                take(full + ".scales", "F16", scales),
            )
        else:
            info = take(full, "F32", shape)
            target = replace(target, pieces=(Piece(info, 0, info.rows),))
        plan.targets.append(target)
    if extra := [name for name in table if name not in used]:
        raise ModelError(f"{path} holds {some(extra)}, which do not belong to this model")
    return plan, pairs


def quantized_jobs(source: Source, config: ModelConfig, stored: StoredQuant) -> Jobs:
    """The weights of such a directory, byte for byte as they are stored."""
    table = read_tensors(source)
    plan, pairs = quantized_plan(config, table, source.path, stored.kind)

    def nbytes(target: Target) -> int:
        return sum(info.nbytes for info in pairs.get(target.name, ())) or target.nbytes

    def work(target: Target, report: Report) -> Matrix | F32:
        if not target.is_matrix:
            return read_vector(target, report)
        codes, scales = pairs[target.name]
        q = QTensor(
            stored.kind,
            target.shape,
            read_plain(codes, 0, codes.rows).reshape(codes.shape),
            read_plain(scales, 0, scales.rows).reshape(scales.shape),
        )
        report(codes.nbytes + scales.nbytes)
        check_values(q, codes)
        return q

    total = sum(info.nbytes for info in table.values())
    return Jobs(config, stored.kind, plan, work, nbytes, total, fixed=True)


def check_values(q: QTensor, info: TensorInfo) -> None:
    """What no quantiser writes, damage does."""
    what = None
    k, groups = q.shape[-1], q.scales.shape[-1]
    if q.scales.size and not np.isfinite(q.scales).all():
        what = "a scale that is not finite"
    elif q.kind == "q8" and q.codes.size and int(q.codes.min()) < -127:
        what = "the code -128"
    elif k % GROUP:
        last = q.codes[..., -(q.codes.shape[-1] // groups) :]
        if q.kind == "q4":
            last = np.concatenate([(last & 15), (last >> 4)], axis=-1).astype(np.int8) - 8
        if last[..., k % GROUP :].any():
            what = "padding that is not zero"
    if what is not None:
        raise ModelError(
            f"{info.path}: {info.name} or its scales hold {what}; the file is damaged: quantise "
            "the model again"
        )


# ----- writing -----------------------------------------------------------------------------------


@dataclass
class Shard:
    """One file to write: which tensors, and where each begins."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    nbytes: int = 0

    def header(self, metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
        """The header's bytes and the position of each tensor in the file."""
        # the widest items first: then every tensor is aligned for its own type
        ordered = sorted(self.entries, key=lambda e: -_ITEM[e[1]])
        described: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for name, dtype, shape in ordered:
            end = at + entry_bytes((name, dtype, shape))
            described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(described, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        offsets = {name: start + described[name]["data_offsets"][0] for name, _, _ in ordered}
        return len(text).to_bytes(8, "little") + text, offsets


def entry_bytes(entry: Entry) -> int:
    return math.prod(entry[2]) * _ITEM[entry[1]]


def _pair(name: str, shape: tuple[int, ...], kind: str) -> tuple[Entry, Entry]:
    """The codes and the scales of a quantised matrix."""
    groups = n_groups(shape[-1])
    width, dtype = (GROUP, "I8") if kind == "q8" else (GROUP // 2, "U8")
    return (
        (name + ".codes", dtype, (*shape[:-1], groups * width)),
        (name + ".scales", "F16", (*shape[:-1], groups)),
    )


def entries_of(target: Target, quant: str) -> list[Entry]:
    """The tensors that one weight becomes in the new files."""
    if not target.is_matrix:
        return [(target.name, "F32", target.shape)]
    if quant != "bf16":
        return list(_pair(target.name, target.shape, quant))
    if len(target.shape) == 2:
        return [(target.name, "BF16", target.shape)]
    # as transformers saves them: one tensor an expert
    prefix = f"model.layers.{target.layer}."
    return [
        (prefix + HF_EXPERT[target.field].format(e=e), "BF16", target.shape[1:])
        for e in range(target.shape[0])
    ]


def make_shards(entries: Iterable[Entry], limit: int) -> list[Shard]:
    """The files that hold ``entries``, in their order, each of at most ``limit`` bytes if it holds
    more than one."""
    shards = [Shard("")]
    for entry in entries:
        size = entry_bytes(entry)
        if shards[-1].entries and shards[-1].nbytes + size > limit:
            shards.append(Shard(""))
        shards[-1].entries.append(entry)
        shards[-1].nbytes += size
    for i, shard in enumerate(shards):
        shard.name = SINGLE
        if len(shards) > 1:
            shard.name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    return shards


def save_quantized(
    source: Source,
    out_dir: Path,
    quant: str,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a directory of quantised weights ("bf16": of plain ones) that loads as it is.

    Streams: tiles are read, quantised and written, the model is never in memory as a whole. The
    directory appears under its name when it is complete; whatever stops the work before (a full
    disk, Ctrl+C) leaves nothing behind. A directory that is there already is replaced only with
    ``force`` and only if it holds nothing but a model.
    """
    if quant not in QUANTS:
        raise UsageError(f"quant is {quant!r}; one of {', '.join(QUANTS)} was wanted")
    out_dir = Path(os.path.abspath(out_dir))  # "." has no name to put a sibling beside
    stored = stored_quant(source)
    if stored is not None:
        raise ModelError(
            f"{source.path} holds weights quantised as {stored.kind}; name the original model"
        )
    _check_target(source, out_dir, force)
    config = read_config(source)
    plan = make_plan(config, read_tensors(source), source.path, gguf=source.kind == "gguf")
    shards = make_shards((e for t in plan.targets for e in entries_of(t, quant)), SHARD_BYTES)
    check_room(out_dir, sum(s.nbytes for s in shards))
    with atomic_dir(out_dir, force=force) as directory:
        _write_companions(source, directory)
        write_json(directory / "config.json", _config_json(source, quant))
        _write_shards(plan, shards, quant, directory, progress)


def write_headers(directory: Path, shards: list[Shard], quant: str) -> dict[str, tuple[Path, int]]:
    """The files at their full size with no more than their headers in them, and the index; where
    the data of each tensor goes."""
    metadata = {"format": "pt"}
    if quant != "bf16":
        metadata = {
            "format": "pykestrel",
            "version": str(VERSION),
            "kind": quant,
            "group_size": str(GROUP),
        }
    where: dict[str, tuple[Path, int]] = {}
    weight_map: dict[str, str] = {}
    for shard in shards:
        path = directory / shard.name
        header, offsets = shard.header(metadata)
        with open(path, "wb") as file:
            file.write(header)
            file.truncate(len(header) + shard.nbytes)
        for name, offset in offsets.items():
            where[name] = (path, offset)
            weight_map[name] = shard.name
    if len(shards) > 1:
        total = sum(s.nbytes for s in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / INDEX, index)
    return where


def _write_shards(
    plan: Plan, shards: list[Shard], quant: str, directory: Path, progress: Progress | None
) -> None:
    where = write_headers(directory, shards, quant)

    def work(target: Target, report: Report) -> None:
        for name, row, row_bytes, data in _rows_to_write(target, quant, report):
            path, offset = where[name]
            with open(path, "r+b", buffering=0) as file:
                file.seek(offset + row * row_bytes)
                view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                while view:  # a write may be partial when the disk is nearly full
                    view = view[file.write(view) :]

    run_jobs(plan.targets, work, plan.nbytes, progress, 0)


def _rows_to_write(
    target: Target, quant: str, report: Report
) -> Iterator[tuple[str, int, int, Any]]:
    """(tensor, first row, bytes a row, rows) pieces of one weight."""
    entries = entries_of(target, quant)
    if not target.is_matrix:
        yield target.name, 0, 0, read_vector(target, report).astype("<f4", copy=False)
    elif quant == "bf16":
        n, k = target.shape[-2:]
        for lo, bits in blocks(target, read_bf16, report):
            # a block never crosses from one expert into the next
            name = entries[lo // n if len(target.shape) == 3 else 0][0]
            yield name, lo % n, 2 * k, bits.astype("<u2", copy=False)
    else:
        (codes, _, code_shape), (scales, _, scale_shape) = entries
        for lo, q in quantized_blocks(target, quant, report):
            yield codes, lo, code_shape[-1], q.codes
            yield scales, lo, 2 * scale_shape[-1], q.scales.astype("<f2", copy=False)


def _config_json(source: Source, quant: str) -> dict[str, Any]:
    """config.json of the new directory."""
    if source.kind == "gguf":
        from .settings import FAMILIES

        d = {k: v for k, v in source.gguf().config_dict.items() if "." not in k and v is not None}
        d["architectures"] = list(FAMILIES[d["model_type"]].architectures)
        d["dtype"] = "bfloat16"
    else:
        d = dict(source.read_json("config.json") or {})
        for key in ("dtype", "torch_dtype"):
            if key in d:
                d[key] = "bfloat16"
    if quant != "bf16":
        d["quantization_config"] = quantization_config(quant)
    return d


def quantization_config(kind: str) -> dict[str, Any]:
    """What config.json says of quantised weights."""
    return {
        "quant_method": "pykestrel",
        "version": VERSION,
        "kind": kind,
        "group_size": GROUP,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_companions(source: Source, directory: Path) -> None:
    """Tokenizer, chat template, generation_config and license, copied or made from a GGUF."""
    if source.kind == "gguf":
        if "tokenizer.ggml.model" in source.gguf().metadata:
            from ..text.tokenizer import Tokenizer

            template = source.gguf().metadata.get("tokenizer.chat_template")
            Tokenizer.from_source(source).save(directory, chat_template=template)
        return
    copy_companions(source.path, directory)


def copy_companions(original: Path, directory: Path) -> None:
    for path in sorted(original.iterdir()):
        if _COMPANIONS.fullmatch(path.name) and path.is_file():
            data = read_bytes(path, 1 << 30)  # refuses an LFS pointer
            (directory / path.name).write_bytes(data)


def _check_target(source: Source, out_dir: Path, force: bool) -> None:
    """Refuse to write over the original, over what is there, or (forced) over what is no model."""
    try:
        original, target = source.path.resolve(), out_dir.resolve()
        if target == original or target in original.parents:
            raise ModelError(f"{out_dir} holds the original model; choose another directory")
        if not out_dir.is_dir():
            if os.path.lexists(out_dir):
                raise ModelError(f"{out_dir} is no directory; choose another name")
            return
        names = sorted(p.name for p in out_dir.iterdir())
    except OSError as error:
        raise KestrelError(f"{out_dir} cannot be read: {reason(error)}; choose another") from None
    if names and not force:
        raise ModelError(
            f"{out_dir} is there already; choose another name, or replace it with --force"
        )
    foreign = [n for n in names if not (_WRITTEN.fullmatch(n) or _COMPANIONS.fullmatch(n))]
    if foreign:
        raise ModelError(
            f"{out_dir} holds {some(foreign)}, which is no part of a model, so it is not replaced; "
            "remove it yourself, or choose another directory"
        )


def check_room(out_dir: Path, needed: int) -> None:
    """Fail before the work when the disk cannot hold the result."""
    parent = out_dir.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise write_error(out_dir, error) from None
    if free < needed:
        raise KestrelError(
            f"{out_dir} needs {needed / 1e9:.3f} GB and its disk has {free / 1e9:.3f} GB free; "
            "make room, or choose another place"
        )
