"""Reasoning and answer come apart the same way for every cut of the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykestrel.text.chat import opens_thinking
from pykestrel.text.thinking import ThinkSplitter

atoms = st.sampled_from(["<think>", "</think>", "<", "think>", "</", "\n", " ", "a", "b<", ">"])
texts = st.lists(atoms, max_size=14).map("".join)


def reference(text: str, inside: bool) -> tuple[str, str]:
    opened = re.match(r"\s*<think>", text)
    if opened:
        text = text[opened.end() :]
    elif not inside:
        return "", text
    elif re.fullmatch(r"\s*(<(t(h(i(n(k)?)?)?)?)?)?", text):
        return text.strip("\n"), ""
    thought, closed, answer = text.partition("</think>")
    return thought.strip("\n"), answer.lstrip("\n") if closed else ""


def run(pieces: list[str], inside: bool) -> tuple[str, str]:
    splitter = ThinkSplitter(inside)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    assert all(text for _, text in parts)
    channels = [channel for channel, _ in parts]
    assert channels == sorted(channels, reverse=True)  # all reasoning before all content
    return tuple(
        "".join(text for channel, text in parts if channel == wanted)
        for wanted in ("reasoning", "content")
    )  # type: ignore[return-value]


@given(text=texts, inside=st.booleans())
def test_whole(text: str, inside: bool) -> None:
    assert run([text], inside) == reference(text, inside)


@given(text=texts, inside=st.booleans())
def test_one_character_at_a_time(text: str, inside: bool) -> None:
    assert run(list(text), inside) == reference(text, inside)


@given(text=texts, inside=st.booleans(), edges=st.lists(st.integers(0, 60), max_size=6))
def test_any_cut(text: str, inside: bool, edges: list[int]) -> None:
    edges = sorted(min(e, len(text)) for e in edges)
    pieces = [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]
    assert run(pieces, inside) == reference(text, inside)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("Hi", False, ("", "Hi")),
        ("\nHi\n", False, ("", "\nHi\n")),
        ("<think>\nhm\n</think>\n\nHi\n", False, ("hm", "Hi\n")),
        ("<think>\n\n</think>\n\nHi", False, ("", "Hi")),
        ("\n<think>hm</think>Hi", False, ("hm", "Hi")),
        ("hm\n</think>\n\nHi", True, ("hm", "Hi")),
        ("<think>\nhm\n</think>Hi", True, ("hm", "Hi")),
        ("never closed\n", True, ("never closed", "")),
        ("a <think>b</think>", False, ("", "a <think>b</think>")),
        ("<think>a<think>b</think>c</think>", False, ("a<think>b", "c</think>")),
        ("<think>\n a\n\nb \n</think> c", False, (" a\n\nb ", " c")),
        ("<thin", True, ("<thin", "")),
        ("", True, ("", "")),
    ],
)
def test_cases(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert run([text], inside) == expected


def test_reasoning_streams_without_delay() -> None:
    splitter = ThinkSplitter(True)
    assert splitter.push("Let me") == [("reasoning", "Let me")]
    assert splitter.push(" see.\n") == [("reasoning", " see.")]
    assert splitter.push("\nSo") == [("reasoning", "\n\nSo")]
    assert splitter.push("</thi") == []
    assert splitter.push("nk>\n") == []
    assert splitter.push("\nYes") == [("content", "Yes")]


@pytest.mark.parametrize(
    ("rendered", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nLet me", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("[INST] <think> [/INST]", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n<think>", True),
        ("", False),
    ],
)
def test_opens_thinking(rendered: str, expected: bool) -> None:
    assert opens_thinking(rendered) is expected
