"""Stop strings: the earliest match wins, however the text arrives, and no part of one is shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pykestrel.text.stop import StopMatcher

letters = st.text(alphabet="ab", max_size=30)  # two letters: matches and near misses abound
stops_of = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    at, _, stop = min(found)
    return text[:at], stop


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = [matcher.push(piece)[0] for piece in pieces]
    out.append(matcher.flush())
    return out, matcher.hit


@st.composite
def cut(draw: st.DrawFn) -> list[str]:
    text = draw(letters)
    edges = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]


@given(pieces=cut(), stops=stops_of)
def test_any_cut_equals_the_whole(pieces: list[str], stops: list[str]) -> None:
    out, hit = run(pieces, stops)
    assert ("".join(out), hit) == reference("".join(pieces), stops)


@given(text=letters, stops=stops_of)
def test_one_character_at_a_time_and_nothing_of_a_stop_shown(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    final, _ = reference(text, stops)
    for n, char in enumerate(text):
        emitted, hit = matcher.push(char)
        shown += emitted
        assert final.startswith(shown)  # never more than the end result
        if hit is not None:
            break
        held = text[: n + 1].removeprefix(shown)
        # what waits is the start of a stop string, or a match that an earlier one may still beat
        assert (
            any(stop.startswith(held) or held.startswith(stop) or stop in held for stop in stops)
            or not held
        )
    assert shown + matcher.flush() == final


@given(pieces=cut())
def test_no_stops_passes_text_through_at_once(pieces: list[str]) -> None:
    matcher = StopMatcher([])
    assert [matcher.push(piece) for piece in pieces] == [(piece, None) for piece in pieces]


def test_match_inside_and_across_pieces() -> None:
    assert run(["say STOP now"], ["STOP"]) == (["say ", ""], "STOP")
    assert run(["say S", "T", "OP now"], ["STOP"]) == (["say ", "", "", ""], "STOP")
    assert run(["say S", "T", "ay"], ["STOP"]) == (["say ", "", "STay", ""], None)


def test_a_longer_match_that_began_earlier_is_waited_for() -> None:
    assert run(["xabc", "d"], ["abcd", "bc"]) == (["x", "", ""], "abcd")
    assert run(["xabc", "e"], ["abcd", "bc"]) == (["x", "a", ""], "bc")
    assert run(["xabc"], ["abcd", "bc"]) == (["x", "a"], "bc")


def test_after_a_hit_everything_is_dropped() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("one. two") == ("one", ".")
    assert matcher.push("three") == ("", ".")
    assert matcher.flush() == ""


def test_empty_push_changes_nothing() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("a") == ("", None)
    assert matcher.push("") == ("", None)
    assert matcher.push("b") == ("", "ab")
