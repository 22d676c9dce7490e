"""`map_raw`: the bytes that `read_raw` gives, and its errors, whatever the file does."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykestrel.errors import ModelError
from pykestrel.loading import tensors
from pykestrel.loading.tensors import TensorInfo, map_raw, read_bf16, read_f32, read_raw

needs_maps = pytest.mark.skipif(not tensors.can_map(), reason="files cannot be mapped here")


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> object:
    """Map pieces of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_LEAST_MAPPED", 1)
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mapped") / "data"
    path.write_bytes(np.random.default_rng(1).bytes(100_003))
    return path


def tensor(path: Path, offset: int, rows: int, width: int, dtype: str = "U8") -> TensorInfo:
    return TensorInfo("w", dtype, (rows, width), path, offset, rows * width)


@given(st.data())
def test_the_same_bytes(file: Path, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 9000))
    rows = data.draw(st.integers(1, max(1, 60_000 // width)))
    offset = data.draw(st.integers(0, 100_003 - rows * width))
    lo = data.draw(st.integers(0, rows))
    hi = data.draw(st.integers(lo, rows))
    info = tensor(file, offset, rows, width)
    assert np.array_equal(map_raw(info, lo, hi), read_raw(info, lo, hi))


@needs_maps
def test_it_is_a_mapping_and_ends_with_its_arrays(file: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(file))

    before = mappings()
    got = map_raw(tensor(file, 4097, 10, 5000), 2, 9)
    assert mappings() == before + 1
    assert not got.flags.writeable
    part = got[3:4]
    del got
    gc.collect()
    assert mappings() == before + 1  # something still looks at it
    del part
    gc.collect()
    assert mappings() == before


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(50_000))
    info = tensor(path, 0, 50, 1000)
    assert not map_raw(info, 40, 50).any()
    os.truncate(path, 45_500)
    assert not map_raw(info, 0, 45).any()
    with pytest.raises(ModelError, match="became shorter while it was read"):
        map_raw(info, 40, 50)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        map_raw(info, 0, 1)


@needs_maps
def test_pages_that_cannot_be_fetched_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tensor(file, 5, 10, 5000)
    want = read_raw(info, 0, 10)
    monkeypatch.setattr(tensors, "_madvise", lambda: lambda at, size, advice: -1)
    got = map_raw(info, 0, 10)
    assert got.flags.owndata or got.flags.writeable  # not the mapping
    assert np.array_equal(got, want)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7FFF, 0xFF81])
def test_what_is_not_finite_in_bf16(tmp_path: Path, bits: int) -> None:
    values = np.full(4000, 0x3F80, np.uint16)
    values[:6] = [0, 0x8000, 0x7F7F, 0xFF7F, 1, 0x8001]  # zeros, the largest, the smallest
    path = tmp_path / "data"
    path.write_bytes(b"x" + values.tobytes())  # and at an odd address
    info = TensorInfo("w", "BF16", (4, 1000), path, 1, 8000)
    for raw in (read_raw, map_raw):
        assert np.array_equal(read_bf16(info, 0, 4, raw).reshape(-1), values)
        assert np.isfinite(read_f32(info, 0, 4, raw)).all()
    values[3999] = bits
    path.write_bytes(b"x" + values.tobytes())
    for raw in (read_raw, map_raw):
        assert read_bf16(info, 0, 3, raw).shape == (3, 1000)
        for read in (read_bf16, read_f32):
            with pytest.raises(ModelError, match="w holds a NaN or infinite weight"):
                read(info, 0, 4, raw)
