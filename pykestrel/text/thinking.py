"""The model's thinking, parted from its answer while both stream by."""

from __future__ import annotations

from typing import Literal

Channel = Literal["reasoning", "content"]
Parts = list[tuple[Channel, str]]

OPEN, CLOSE = "<think>", "</think>"


class ThinkSplitter:
    """Splits text into ("reasoning", ...) and ("content", ...) parts.

    The text thinks when the prompt ended inside ``<think>`` (``starts_inside``) or when it begins
    with ``<think>``, white space before it allowed. The first ``</think>`` ends the thinking; a
    ``<think>`` anywhere else is plain text. Without ``</think>`` all of it is reasoning.

    Newlines beside the tags belong to the tags: reasoning has none at its two ends, and content
    none at its start when it follows thinking. How the text is cut into pieces changes nothing:
    a tag or a newline whose role is open waits.
    """

    def __init__(self, starts_inside: bool = False) -> None:
        self._state: Literal["start", "inside", "after", "content"] = "start"
        self._inside = starts_inside
        self._leading = True  # no reasoning character seen yet
        self._held = ""

    def push(self, text: str) -> Parts:
        """Add text; return the parts that are certain now."""
        self._held += text
        parts: Parts = []
        while self._held and self._advance(parts):
            pass
        return parts

    def flush(self) -> Parts:
        """The end of the stream: what was held back."""
        held, self._held = self._held, ""
        if self._state == "inside":
            held = held.strip("\n") if self._leading else held.rstrip("\n")
            return [("reasoning", held)] if held else []
        if self._state == "start" and self._inside:
            held = held.strip("\n")
            return [("reasoning", held)] if held else []
        if self._state == "after":
            held = held.lstrip("\n")
        return [("content", held)] if held else []

    def _advance(self, parts: Parts) -> bool:
        """Use up some of the held text; False when nothing more is certain."""
        if self._state == "start":
            return self._start()
        if self._state == "inside":
            return self._reason(parts)
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
            self._state = "content"
        parts.append(("content", self._held))
        self._held = ""
        return False

    def _start(self) -> bool:
        """Decide whether the text begins with <think>; with starts_inside it may repeat the tag."""
        body = self._held.lstrip()
        if body.startswith(OPEN):
            self._held = body[len(OPEN) :]
            self._state = "inside"
        elif OPEN.startswith(body):  # too short to tell ("" too)
            return False
        else:
            self._state = "inside" if self._inside else "content"
        return bool(self._held)

    def _reason(self, parts: Parts) -> bool:
        if self._leading:
            self._held = self._held.lstrip("\n")
        end = self._held.find(CLOSE)
        # Before the tag is seen, its first characters and the newlines before them wait.
        keep = end if end >= 0 else len(self._held) - _overlap(self._held, CLOSE)
        text = self._held[:keep].rstrip("\n")
        if text:
            parts.append(("reasoning", text))
            self._leading = False
        if end < 0:
            self._held = self._held[len(text) :]
            return False
        self._held = self._held[end + len(CLOSE) :]
        self._state = "after"
        return bool(self._held)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``tag``."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)
