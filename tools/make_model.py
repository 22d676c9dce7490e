#!/usr/bin/env python3
"""Write a model of random weights, with every file and tensor that a real one of its shape has.

    python3 tools/make_model.py SHAPE DIR [--kind bf16|q8|q4] [--tokenizer FROM]

SHAPE is a name of `pykestrel bench --synthetic`, such as qwen3-30b-a3b, or a config.json. bf16 is
what Hugging Face has (shards of 5 GB, one tensor an expert), q8 and q4 are what `pykestrel
quantize` writes. `pykestrel run --prompt-ids 1,2,3` and `bench` need no tokenizer; --tokenizer
copies that of a model directory. A few random blocks are written again and again, as fast as the
file system takes them: it is for measuring how fast a model loads.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pykestrel import shapes  # noqa: E402
from pykestrel.config import ModelConfig  # noqa: E402
from pykestrel.errors import KestrelError, UsageError  # noqa: E402
from pykestrel.files import atomic_dir  # noqa: E402
from pykestrel.loading.families import Target, canonical_name, expected_shapes  # noqa: E402
from pykestrel.loading.jsonfile import read_json_object  # noqa: E402
from pykestrel.loading.quantized import (  # noqa: E402
    SHARD_BYTES,
    Entry,
    check_room,
    copy_companions,
    entries_of,
    entry_bytes,
    make_shards,
    quantization_config,
    write_headers,
    write_json,
)
from pykestrel.loading.tensors import ITEM  # noqa: E402
from pykestrel.machine import cores  # noqa: E402
from pykestrel.quant import GROUP, f32_to_bf16  # noqa: E402

KINDS = ("bf16", "q8", "q4")
HF_SHARD_BYTES = 5_000_000_000
BLOCK = 64 << 20  # bytes of random values of one sort
PIECE = 16 << 20  # bytes of one write
CODE_STD = {"q8": 73.3, "q4": 4.6}  # of codes that are all as likely

Bytes: TypeAlias = NDArray[np.uint8]
Sort: TypeAlias = tuple[str, str, int]  # what, dtype, input features (0: any) of equal values


@dataclass(frozen=True)
class Tensor:
    """One tensor to write and the sort of its values."""

    entry: Entry
    sort: Sort
    place: tuple[int, str]  # in the order of the files


def tensors(config: ModelConfig, kind: str) -> Iterator[Tensor]:
    """Every tensor of a model, as files of that kind hold them."""
    for layer, field, shape in expected_shapes(config):
        name = canonical_name(layer, field, len(shape) == 3)
        target = Target(layer, field, name, shape, ())
        for tensor, dtype, extents in entries_of(target, kind):
            if kind == "bf16":
                dtype = "BF16"  # norms too, in a file of Hugging Face
            what = "weights"
            if field.endswith(("norm", "bias")):
                what = "ones" if field.endswith("norm") else "zeros"
            elif target.is_matrix and kind != "bf16":
                what = f"{kind} {tensor.rpartition('.')[2]}"
            at = -1 if field == "embed" else config.num_hidden_layers if layer is None else layer
            k = 0 if what.endswith("codes") else shape[-1]
            yield Tensor((tensor, dtype, extents), (what, dtype, k), (at, tensor))


def values(sort: Sort, nbytes: int) -> Bytes:
    """At least ``nbytes`` bytes of one sort, or about 64 MB to be repeated.

    Weights are normal with the variance 1 / K, so that a product of them keeps its size; codes are
    all as likely, and their scales, half of them negative for q4, give the same variance.
    """
    what, dtype, k = sort
    # an odd number of them is no multiple of a row: no two rows of a matrix begin alike
    n = min(nbytes, BLOCK) // ITEM[dtype].itemsize | 1
    rng = np.random.default_rng([k, *what.encode()])
    std = 1 / math.sqrt(max(1, k))
    made: NDArray[Any]
    if what in ("ones", "zeros"):
        made = np.full(n, float(what == "ones"), np.float32)
    elif what.endswith("codes"):
        high = 255 if what.startswith("q8") else 256
        made = rng.integers(0, high, n, np.uint8)
        made -= np.uint8(127 if high == 255 else 0)  # -127 to 127 as int8
    elif what.endswith("scales"):
        made = rng.uniform(0.5, 1.5, n).astype(np.float32) * np.float32(std / CODE_STD[what[:2]])
        if what.startswith("q4"):
            made *= rng.choice(np.array([-1, 1], np.float32), n)
    else:
        made = rng.standard_normal(n, np.float32) * np.float32(std)
    if dtype == "BF16":
        made = f32_to_bf16(made)
    if not what.endswith("codes"):
        made = made.astype(ITEM[dtype], copy=False)
    return made.view(np.uint8)


def pieces(block: int, first: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(offset in the tensor, offset in the block, bytes) of the writes that make a tensor."""
    done = 0
    while done < nbytes:
        at = (first + done) % block
        size = min(PIECE, nbytes - done, block - at)
        yield done, at, size
        done += size


def fill(path: Path, tensors: list[tuple[int, int, Bytes, int]], stopped: Event) -> None:
    """Write (offset in the file, bytes, block, offset in the block) one after the other: a file has
    one writer at a time, so it is files that are written side by side."""
    fd = os.open(path, os.O_WRONLY)
    try:
        for offset, nbytes, block, first in tensors:
            for done, at, size in pieces(len(block), first, nbytes):
                if stopped.is_set():
                    return
                write(fd, offset + done, block[at : at + size].data)
    finally:
        os.close(fd)


def write(fd: int, offset: int, data: memoryview) -> None:
    while len(data):  # a write may be partial when the disk is nearly full
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def make_model(
    config_json: dict[str, Any],
    where: str,
    directory: Path,
    kind: str,
    tokenizer: Path | None = None,
) -> int:
    """Write a model directory, which appears under its name when it is complete; its bytes."""
    if os.path.lexists(directory):
        raise UsageError(f"{directory} is there already; choose another name, or remove it")
    config = ModelConfig.from_dict(config_json, where)
    made = {tensor.entry[0]: tensor for tensor in tensors(config, kind)}
    if kind != "bf16":
        config_json = {**config_json, "quantization_config": quantization_config(kind)}
        odd = {k for what, _, k in (t.sort for t in made.values()) if what[0] == "q" and k % GROUP}
        if odd:  # their padding would have to be zeros
            raise UsageError(
                f"{where}: a matrix has {min(odd)} input features, and random codes are made for "
                f"multiples of {GROUP} alone; take bf16, or another shape"
            )
    order = list(made.values())
    if kind == "bf16":
        order.sort(key=lambda tensor: tensor.place)
    limit = HF_SHARD_BYTES if kind == "bf16" else SHARD_BYTES
    shards = make_shards((tensor.entry for tensor in order), limit)
    for shard in shards:
        if kind == "bf16":  # as the safetensors library writes them
            shard.entries.sort()
    check_room(directory, sum(shard.nbytes for shard in shards))
    largest: dict[Sort, int] = {}
    for tensor in order:
        largest[tensor.sort] = max(largest.get(tensor.sort, 0), entry_bytes(tensor.entry))
    if tokenizer is not None and not tokenizer.is_dir():
        raise UsageError(f"{tokenizer} is no directory, and should be one with a tokenizer")
    with atomic_dir(directory, flush=False) as temporary, ThreadPoolExecutor(cores()) as pool:
        write_json(temporary / "config.json", config_json)
        if tokenizer is not None:
            copy_companions(tokenizer, temporary)
        places = write_headers(temporary, shards, kind)
        blocks = dict(zip(largest, pool.map(values, largest, largest.values()), strict=True))
        jobs: dict[Path, list[tuple[int, int, Bytes, int]]] = {
            path: [] for path, _ in places.values()
        }
        for i, (name, (path, offset)) in enumerate(places.items()):
            item = ITEM[made[name].entry[1]].itemsize
            block = blocks[made[name].sort]
            first = i * 40_503_001 * item % len(block)  # its values begin elsewhere for each tensor
            jobs[path].append((offset, entry_bytes(made[name].entry), block, first))
        stopped = Event()
        try:
            list(pool.map(fill, jobs, jobs.values(), repeat(stopped)))
        except BaseException:  # Ctrl+C too: the other files need not be finished
            stopped.set()
            raise
    return sum(shard.nbytes for shard in shards)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"Shapes: {', '.join(shapes.NAMES)}; or the path of a config.json.",
    )
    parser.add_argument("shape", metavar="SHAPE")
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="bf16")
    parser.add_argument("--tokenizer", type=Path, metavar="FROM")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left behind
    before = time.perf_counter()
    try:
        if args.shape.endswith(".json"):
            config_json, where = read_json_object(Path(args.shape)), args.shape
        else:
            config_json, where = shapes.config_json(args.shape), f"the shape {args.shape}"
            config_json |= {"torch_dtype": "bfloat16"}
        nbytes = make_model(config_json, where, args.directory, args.kind, args.tokenizer)
    except KestrelError as error:
        print(f"make_model: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    seconds = time.perf_counter() - before
    print(
        f"{args.directory}: {nbytes / 1e9:.2f} GB as {args.kind} in {seconds:.1f} s "
        f"({nbytes / 1e9 / seconds:.1f} GB/s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
