"""Saved conversations: what was saved comes back, and nothing else crashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykestrel.cli import terminal
from pykestrel.cli.conversation import SETTINGS, Conversation, find_setting
from pykestrel.errors import KestrelError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": texts},
    optional={"reasoning_content": texts},
)
settings_ = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 10),
        "max_tokens": st.integers(0, 2**40),
        "seed": st.integers(0, 2**64 - 1),
        "stop": st.lists(texts.filter(bool), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), min_size=1),
        "ignore_eos": st.booleans(),
        "think": st.booleans(),
    },
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("talk") / "talk.json"


@given(system=st.none() | texts, settings=settings_, talk=st.lists(messages, max_size=4))
def test_what_was_saved_comes_back(
    file: Path, system: str | None, settings: dict[str, Any], talk: list[dict[str, str]]
) -> None:
    saved = Conversation("a model", system, settings, talk)
    saved.save(file)
    assert Conversation.load(file) == saved


@given(
    st.one_of(
        anything,
        st.fixed_dictionaries(
            {},
            optional={
                "messages": st.lists(messages | anything, max_size=3) | anything,
                "system": anything,
                "model": anything,
                "settings": st.dictionaries(st.sampled_from(sorted(SETTINGS)), anything) | anything,
            },
        ),
    )
)
def test_any_json_is_loaded_or_refused(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))
    try:
        talk = Conversation.load(file)
    except KestrelError:
        return
    assert all(m["role"] in ("user", "assistant") for m in talk.messages)
    assert set(talk.settings) <= set(SETTINGS)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"messages": [', b"[" * 100_000])
def test_what_is_no_json(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises(KestrelError, match="talk"):
        Conversation.load(file)


def test_settings_go_by_every_name_of_their_flags() -> None:
    names = {
        "temperature": "temperature", "temp": "temperature", "--temp": "temperature",
        "max_tokens": "max_tokens", "max-tokens": "max_tokens", "n": "max_tokens",
        "top_p": "top_p", "repeat-penalty": "repetition_penalty", "think": "think",
    }  # fmt: skip
    for name, dest in names.items():
        assert find_setting(name).dest == dest
    with pytest.raises(KestrelError, match="temprature"):
        find_setting("temprature")


def test_progress_off_a_terminal_says_what_and_how_much(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.Terminal().progress("fetching a-model") as report:
        for second in range(25):
            now[0] = float(second)
            report("", second * 1_000_000, 100_000_000)
        report("", 0, 0)
    assert capsys.readouterr().err.splitlines() == [
        "fetching a-model: 10 MB of 100 MB, 10 %",
        "fetching a-model: 20 MB of 100 MB, 20 %",
    ]
