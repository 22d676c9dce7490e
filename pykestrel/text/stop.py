"""Stop strings in streamed text: matched across and inside tokens, never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the earliest stop string in a text that arrives in pieces.

    "Earliest" is by where the match begins; of two that begin together the shorter one wins. The
    result is the same for every way to cut the text into pieces, and equals looking at the whole
    text at once: text that could be the start of an earlier match waits until that is decided.

    Each stop string keeps the length of its longest prefix that ends the text so far (the
    automaton of Knuth, Morris and Pratt), so the work is (characters x stop strings).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._fallback = [_fallback(stop) for stop in self._stops]
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""  # the end of the text, not emitted yet
        self._found: tuple[int, int, str] | None = None  # start in _held, length, stop string
        self.hit: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown now and the stop string once it is decided.

        After a hit the text is over: everything pushed later is dropped.
        """
        if self.hit is not None:
            return "", self.hit
        if not self._stops or (not self._held and self._firsts.isdisjoint(text)):
            return text, None
        at = len(self._held)
        waiting = at - max(self._matched)  # where the earliest match still open begins
        self._held += text
        while at < len(self._held):
            at += 1
            self._step(self._held[at - 1], at)
            waiting = at - max(self._matched)
            if self._found is not None and waiting >= self._found[0]:
                return self._end(self._found), self.hit
        return self._emit(waiting), None  # a match that was found begins after `waiting`

    def flush(self) -> str:
        """The end of the stream: what was held back, less a match that was waiting (see `hit`)."""
        if self.hit is not None:
            return ""
        if self._found is not None:
            return self._end(self._found)
        rest, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return rest

    def _step(self, char: str, end: int) -> None:
        """Advance every automaton by the character that ends at ``end`` of the held text."""
        for n, stop in enumerate(self._stops):
            length = self._matched[n]
            while length and stop[length] != char:
                length = self._fallback[n][length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                match = (end - length, length, stop)
                if self._found is None or match < self._found:
                    self._found = match
                length = self._fallback[n][length - 1]
            self._matched[n] = length

    def _emit(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        if self._found is not None:
            start, length, stop = self._found
            self._found = (start - count, length, stop)
        return text

    def _end(self, found: tuple[int, int, str]) -> str:
        start, _, self.hit = found
        text, self._held = self._held[:start], ""
        return text


def _fallback(stop: str) -> list[int]:
    """For every prefix of ``stop``: the length of its longest proper prefix that also ends it."""
    table = [0]
    for n in range(1, len(stop)):
        length = table[n - 1]
        while length and stop[length] != stop[n]:
            length = table[length - 1]
        table.append(length + 1 if stop[length] == stop[n] else 0)
    return table
