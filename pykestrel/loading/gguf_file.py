"""GGUF files: read by the reader of the `gguf` package, made quick and safe for strangers' files.

`GGUFReader` walks the header element by element (8 seconds for the 300,000 strings of a Qwen
vocabulary) and trusts counts, shapes and offsets. `_HeaderReader` keeps its walk, takes arrays
in one piece (0.3 seconds), checks every length against the file, and describes the tensors as
`TensorInfo` with integers that cannot overflow. Weights are decoded by `gguf.quants.dequantize`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import KestrelError, ModelError
from .jsonfile import is_lfs_pointer, lfs_error, open_checked, shown
from .tensors import PLAIN, TensorInfo, TensorTable

MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 20
_AGAIN = "download it again"


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a header as plain Python values; arrays are decoded when asked for."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = value.decode(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: str, value: Any) -> None:
        self._values[key] = value

    def length(self, key: str) -> int | None:
        """Elements of an array, without decoding it; None if ``key`` is no array."""
        value = self._values.get(key)
        if isinstance(value, _Array):
            return value.count
        return len(value) if isinstance(value, list) else None


class _Array:
    """An array as it lies in the file."""

    def __init__(self, dtype: Any, count: int, raw: bytes) -> None:
        self.dtype, self.count, self.raw = dtype, count, raw  # dtype None: strings

    def decode(self, key: str) -> list[Any]:
        if self.dtype is not None:
            values = np.frombuffer(self.raw, self.dtype)
            return _shortest(values) if self.dtype == np.float32 else list(values.tolist())
        strings, raw, at = [], self.raw, 0
        try:
            for _ in range(self.count):
                end = at + 8 + int.from_bytes(raw[at : at + 8], "little")
                strings.append(raw[at + 8 : end].decode("utf-8"))
                at = end
        except UnicodeDecodeError:
            raise ModelError(
                f"the GGUF metadata {shown(key)} holds text that is not UTF-8 (element "
                f"{len(strings)}); {_AGAIN}"
            ) from None
        return strings


def _shortest(values: NDArray[np.float32]) -> list[float]:
    """The shortest decimals that give these float32 values: 1e-05, not 9.99999974737875e-06."""
    return [float(str(v)) for v in values]


class GGUFFile:
    """An opened GGUF file. Nothing of it stays mapped or open."""

    metadata: Metadata
    tensors: TensorTable

    def __init__(self, path: Path) -> None:
        """ModelError for a file that is damaged, hostile, or of a kind that cannot be read."""
        self.path = path
        _check_head(path)
        reader_class = _header_reader()
        try:
            # np.memmap inside warns of nothing and raises ValueError for all that can go wrong
            reader = reader_class(path)
            self.metadata, self.tensors = reader.metadata, reader.table
        except KestrelError:
            raise
        except MemoryError:
            raise
        except Exception as error:  # a parser on hostile bytes: whatever it raises, it is refused
            words = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise ModelError(
                f"{path} is damaged, or no GGUF file that this version reads ({words}); {_AGAIN}"
            ) from None
        parts = self.metadata.get("split.count", 1)
        if type(parts) is int and parts > 1:
            raise ModelError(
                f"{path} is one of {parts} parts of a model; join them first "
                "(`llama-gguf-split --merge`)"
            )

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration that the metadata describes."""
        return ModelConfig.from_dict(self.config_dict, f"{self.path}, metadata")

    @cached_property
    def config_dict(self) -> dict[str, Any]:
        """The metadata as a config.json would say it."""
        from .gguf_config import config_dict

        return config_dict(self)


def _check_head(path: Path) -> None:
    fd, size = open_checked(path)
    with os.fdopen(fd, "rb") as file:
        head = file.read(256)
    if is_lfs_pointer(head):
        raise lfs_error(path)
    if len(head) < 24:
        raise ModelError(
            f"{path} is {'empty' if not size else f'only {size} bytes long'}, so it is no GGUF "
            f"file; {_AGAIN}"
        )
    if head[:4] != b"GGUF":
        raise ModelError(f"{path} is no GGUF file (it begins with {shown(head[:4])}); {_AGAIN}")
    version = int.from_bytes(head[4:8], "little")
    if version not in (2, 3):
        words = f"version {version}"
        if version & 0xFFFF == 0:
            words = "made for big-endian machines"
        raise ModelError(f"{path} is a GGUF file {words}; little-endian version 2 or 3 is wanted")
    tensors, fields = struct.unpack_from("<QQ", head, 8)
    # a tensor is described by 24 bytes at least, a field by 13
    for what, count, most in (
        ("tensors", tensors, min(MAX_TENSORS, size // 24)),
        ("metadata fields", fields, min(MAX_FIELDS, size // 13)),
    ):
        if count > most:
            raise ModelError(
                f"{path} is damaged: its header promises {count} {what} in {size} bytes; {_AGAIN}"
            )


def import_gguf() -> Any:
    """The optional `gguf` package."""
    try:
        import gguf
    except ImportError:
        raise ModelError(
            'GGUF files need the gguf package; install it with `pip install "pykestrel[gguf]"`'
        ) from None
    return gguf


def _header_reader() -> Any:
    """`GGUFReader` made quick and strict; made here because the package is optional."""
    gguf = import_gguf()
    types = gguf.GGUFValueType

    class HeaderReader(gguf.GGUFReader):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, path: Path) -> None:
            self.path = path
            self.metadata = Metadata()
            self.table: TensorTable = {}
            super().__init__(path)
            for field in self.fields.values():
                if field.types and not field.name.startswith("GGUF."):
                    self.metadata.put(field.name, self._plain(field))
            # What was taken is copied: drop the mapping, which would die with the file.
            self.fields.clear()
            del self.data

        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
        ) -> NDArray[Any]:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ModelError(
                    f"{self.path} is truncated or damaged: something ends at byte {end} and the "
                    f"file at {len(self.data)}; {_AGAIN}"
                )
            part: NDArray[Any] = super()._get(int(offset), dtype, int(count), override_order)
            return part

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[NDArray[Any]], list[int], list[Any]]:
            kind = types(raw_type)
            if kind != types.ARRAY:
                scalar: tuple[int, list[NDArray[Any]], list[int], list[Any]]
                scalar = super()._get_field_parts(orig_offs, raw_type)
                return scalar
            item = types(self._get(orig_offs, np.uint32)[0])
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            start = orig_offs + 12
            if item == types.STRING:
                end = self._end_of_strings(start, count)
            elif item in self.gguf_scalar_to_np:
                end = start + count * np.dtype(self.gguf_scalar_to_np[item]).itemsize
            else:
                raise ValueError(f"an array of {item.name} is not supported")
            head = self._get(orig_offs, np.uint8, 12)
            body = self._get(start, np.uint8, end - start)
            return end - orig_offs, [head, body], [1], [kind, item]

        def _end_of_strings(self, at: int, count: int) -> int:
            data, size = memoryview(self.data), len(self.data)
            unpack = struct.Struct("<Q").unpack_from
            if count > (size - at) // 8:
                raise ValueError(f"an array of {count} strings does not fit into the file")
            for _ in range(count):
                if at + 8 > size:
                    raise ValueError("an array of strings is cut off")
                at += 8 + unpack(data, at)[0]
            return at

        def _plain(self, field: Any) -> Any:
            kind, body = field.types[0], field.parts[-1]
            if kind == types.STRING:
                return str(bytes(body), "utf-8")
            if kind == types.ARRAY:
                item = field.types[-1]
                count = int.from_bytes(bytes(field.parts[-2][4:12]), "little")
                dtype = None if item == types.STRING else np.dtype(self.gguf_scalar_to_np[item])
                return _Array(dtype, count, bytes(body))
            if kind == types.FLOAT32:
                return _shortest(body)[0]
            return body.tolist()[0]

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            end = int(start_offs)
            infos = [self._tensor(int(start_offs), field) for field in fields]
            for info in sorted(infos, key=lambda i: (i.offset, i.nbytes)):
                if info.name in self.table:
                    raise ValueError(f"the tensor {shown(info.name)} is there twice")
                # the writer pads each tensor to the alignment: anything else is damage
                if not 0 <= info.offset - end < max(int(self.alignment), 32):
                    what = "overlaps" if info.offset < end else "leaves a gap after"
                    raise ValueError(f"the tensor {shown(info.name)} {what} what is before it")
                end = info.offset + info.nbytes
                self.table[info.name] = info

        def _tensor(self, start: int, field: Any) -> TensorInfo:
            _, name_data, _, dims, raw_dtype, offset = field.parts
            name = str(bytes(name_data), "utf-8")
            shape = tuple(int(d) for d in dims[::-1])
            if not 1 <= len(shape) <= 8 or min(shape) < 1:
                raise ValueError(f"the tensor {shown(name)} has the shape {shown(list(shape))}")
            kind = gguf.GGMLQuantizationType(int(raw_dtype[0]))
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(
                    f"the tensor {shown(name)} has rows of {shape[-1]}, no multiple of {block}"
                )
            nbytes = math.prod(shape) // block * block_bytes
            at = start + int(offset[0])
            if at + nbytes > len(self.data):
                raise ModelError(
                    f"{self.path} is truncated: {shown(name)} ends at byte {at + nbytes} and the "
                    f"file at {len(self.data)}; {_AGAIN}"
                )
            decode = None if kind.name in PLAIN else partial(_decode, kind)
            return TensorInfo(name, kind.name, shape, self.path, at, nbytes, decode)

    return HeaderReader


def _decode(kind: Any, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Rows of blocks ``[n, bytes a row]`` as float32 ``[n, K]``."""
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # damaged scales give NaN, which the caller refuses
        try:
            values: NDArray[np.float32] = dequantize(raw, kind)
        except NotImplementedError:
            raise ModelError(
                f"the gguf package cannot decode the weight type {kind.name}; take a file of "
                "another type (Q8_0, Q6_K, Q5_K, Q4_K ...)"
            ) from None
    return values
