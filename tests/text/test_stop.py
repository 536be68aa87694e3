from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.text.stop import StopMatcher

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)


def naive_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Text before the stop string that ends first, the longest one of those."""
    for end in range(len(text) + 1):
        ending = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=6))
def test_matching_in_pieces_equals_a_search_of_the_whole(text: str, stop: tuple[str, ...], cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(text)]
    matcher = StopMatcher(stop)
    shown, matched = "", None
    for start, end in pairwise(borders):
        emitted, matched = matcher.push(text[start:end])
        shown += emitted
        if matched:
            break
    else:
        shown += matcher.flush()
    assert (shown, matched) == naive_stop(text, stop)


@given(LETTERS, STOPS)
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stop: tuple[str, ...]) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    for end, character in enumerate(text, start=1):
        emitted, matched = matcher.push(character)
        if matched:
            return
        shown += emitted
        held = text[len(shown) : end]
        assert held == "" or any(candidate.startswith(held) for candidate in stop)
        longer = text[max(len(shown) - 1, 0) : end]
        assert longer == held or not any(candidate.startswith(longer) for candidate in stop)


def test_nothing_is_held_without_a_reason() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.push("one\n") == ("one", None)
    assert matcher.push("two") == ("\ntwo", None)
    assert matcher.push("\n\nUs") == ("", None)
    assert matcher.flush() == "\n\nUs"
    assert matcher.flush() == ""


def test_a_long_text_of_near_misses_is_matched_in_one_pass() -> None:
    stop = "a" * 2_000 + "b"
    matcher = StopMatcher((stop,))
    shown = "".join(matcher.push("a" * 50)[0] for _ in range(4_000))
    assert len(shown) == 200_000 - 2_000
    assert matcher.push("b") == ("", stop)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="a stop string is empty") as error:
        StopMatcher(("a", ""))
    assert error.value.param == "stop"
