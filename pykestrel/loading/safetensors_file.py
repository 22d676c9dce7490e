"""safetensors files: one, or many with an index, checked before a byte of them is trusted.

The header is parsed here and not by the safetensors library because NumPy has no bfloat16, and
because each fault of a download (an LFS pointer, a truncated file, a shard that is not there)
deserves its own sentence. Format: 8 bytes little-endian length n, n bytes of JSON that maps
names to {dtype, shape, data_offsets}, then the data without gaps.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..files import reason
from .jsonfile import (
    is_lfs_pointer,
    lfs_error,
    open_checked,
    parse_json,
    read_json_object,
    shown,
)
from .tensors import TensorInfo, TensorTable

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F4": 4,
}
_KEYS = {"dtype", "shape", "data_offsets"}
_INTEGERS = {int}  # not bool
_AGAIN = "download it again"


def read_header(path: Path) -> tuple[TensorTable, dict[str, str]]:
    """The tensors and the metadata of one file; ModelError says what is wrong with it."""
    fd, size = open_checked(path)
    with os.fdopen(fd, "rb") as file:
        try:
            head = file.read(8)
            if is_lfs_pointer(head + file.read(192)):
                raise lfs_error(path)
            if len(head) < 8:
                words = "is empty" if size == 0 else f"has only {size} bytes"
                raise ModelError(f"{path} {words}; {_AGAIN}")
            length = int.from_bytes(head, "little")
            if length > MAX_HEADER:
                raise ModelError(
                    f"{path} is not a safetensors file, or is damaged: its first 8 bytes say that "
                    f"the header has {length} bytes (at most {MAX_HEADER}); {_AGAIN}"
                )
            if 8 + length > size:
                raise ModelError(
                    f"{path} is truncated: it has {size} bytes and its header alone ends at "
                    f"{8 + length}; {_AGAIN}"
                )
            file.seek(8)
            raw = file.read(length)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {reason(error)}") from None
    where = f"{path}, header"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is damaged: its header is no UTF-8 text (byte {error.start}); {_AGAIN}"
        ) from None
    header = parse_json(text, where)
    if not isinstance(header, dict):
        raise ModelError(f"{where} is no JSON object; {_AGAIN}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ModelError(f"{where}: __metadata__ must map names to strings; {_AGAIN}")
    table = {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_layout(path, table, 8 + length, size)
    return table, metadata


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    """One checked entry of a header; the data of the file begins at ``start``."""

    def bad(what: str) -> ModelError:
        return ModelError(f"{path} is damaged: {shown(name, 120)} {what}; {_AGAIN}")

    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise bad("is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise bad(f"has the unknown dtype {shown(dtype)}")
    if not _sizes(shape) or len(shape) > 16:
        raise bad(f"has the shape {shown(shape)}")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"has the data_offsets {shown(offsets)}")
    lo, hi = offsets
    bits = math.prod(shape) * _ITEM_BITS[dtype]
    if bits != 8 * (hi - lo):
        raise bad(f"needs {bits // 8} bytes as {dtype} {shown(shape)} but has {hi - lo}")
    if start + hi > size:
        raise ModelError(
            f"{path} is truncated: {shown(name, 120)} ends at byte {start + hi} and the file at "
            f"{size}; {_AGAIN}"
        )
    return TensorInfo(name, dtype, tuple(shape), path, start + lo, hi - lo)


def _sizes(value: object) -> bool:
    if not isinstance(value, list) or not _INTEGERS.issuperset(map(type, value)):
        return False
    return not value or (min(value) >= 0 and max(value) < 1 << 62)


def _check_layout(path: Path, table: TensorTable, start: int, size: int) -> None:
    """The tensors must cover the data of the file exactly: no overlap, no gap, no rest."""
    end = start
    for info in sorted(table.values(), key=lambda t: (t.offset, t.nbytes)):
        if info.offset != end:
            what = "overlaps" if info.offset < end else "leaves a gap after"
            raise ModelError(
                f"{path} is damaged: {shown(info.name, 120)} {what} the tensor before it; {_AGAIN}"
            )
        end = info.offset + info.nbytes
    if end != size:
        raise ModelError(
            f"{path} is damaged: its tensors end at byte {end} and the file at {size}; {_AGAIN}"
        )


def read_directory(directory: Path) -> tuple[TensorTable, dict[str, str]]:
    """All tensors of a model directory, sharded or not, and the metadata of its first file."""
    index, single = directory / INDEX, directory / SINGLE
    if os.path.lexists(index):
        table, metadata = _read_sharded(directory, index)
        if os.path.lexists(single) and all(t.path != single for t in table.values()):
            raise ModelError(
                f"{directory} holds both {SINGLE} and {INDEX} with other files, so it is unclear "
                "which of them is the model; remove one"
            )
        return table, metadata
    if os.path.lexists(single):
        return read_header(single)
    return read_header(_only_file(directory))


def _only_file(directory: Path) -> Path:
    """The one .safetensors file of a directory that has none of the usual names."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise ModelError(f"{directory} cannot be read: {reason(error)}") from None
    files = [n for n in names if n.endswith(".safetensors") and not n.startswith("adapter_")]
    if len(files) == 1 and not re.search(r"-\d+-of-\d+\.", files[0]):
        return directory / files[0]
    if files:
        raise ModelError(
            f"{directory} holds {len(files)} .safetensors files but no {INDEX} that says how they "
            "belong together; download the index too"
        )
    if "adapter_config.json" in names:
        raise ModelError(
            f"{directory} holds an adapter (LoRA), not a model; merge it into its base model first"
        )
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        raise ModelError(
            f"{directory} holds only PyTorch pickle files, which can run code and are not read; "
            "convert the model to safetensors"
        )
    raise ModelError(f"{directory} holds no {SINGLE}; download the weights of the model")


def _read_sharded(directory: Path, index: Path) -> tuple[TensorTable, dict[str, str]]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map must be an object that maps tensors to files")
    plain: set[str] = set()  # a file has thousands of tensors
    for name, file in weight_map.items():
        if isinstance(file, str) and file in plain:
            continue
        if isinstance(file, str) and _plain_name(file):
            plain.add(file)
        else:
            raise ModelError(
                f"{index}: weight_map[{shown(name, 120)}] is {shown(file)}; the name of a "
                ".safetensors file in the same directory was wanted"
            )
    shards = sorted(plain)
    missing = [s for s in shards if not os.path.exists(directory / s)]
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{directory / missing[0]}{rest} is missing ({INDEX} names {len(shards)} files); "
            "download the model again"
        )
    table: TensorTable = {}
    metadata: dict[str, str] = {}
    paths = {shard: directory / shard for shard in shards}  # the very objects of the table
    for shard, path in paths.items():
        tensors, found = read_header(path)
        metadata = metadata or found
        for name, info in tensors.items():
            if name in table:
                raise ModelError(
                    f"{directory}: {shown(name, 120)} is both in {table[name].path.name} and in "
                    f"{shard}; {_AGAIN}"
                )
            table[name] = info
    for name, shard in weight_map.items():
        if name not in table or table[name].path is not paths[shard]:
            raise ModelError(
                f"{directory / shard} does not hold {shown(name, 120)}, as {INDEX} says it does; "
                "download the model again"
            )
    return table, metadata


def _plain_name(name: str) -> bool:
    """A file name and nothing else: no directory, drive, stream, device or hidden file."""
    return (
        len(name) < 256
        and re.fullmatch(r"[^\x00-\x1f/\\:*?\"<>|\ud800-\udfff]+\.safetensors", name) is not None
        and not name.startswith(".")
    )
