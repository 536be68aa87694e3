from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.text.channels import Channel, Delta, collect
from perilune.text.stream import TextStream
from perilune.text.tokenizer import Tokenizer

from .conftest import small_ranks
from .test_parser import IDS, RESPONSE, RESPONSE_END, STARTS, THINK_END, TOOLS, TOOLS_END
from .test_stop import naive_stop

TOKENIZER = Tokenizer.from_ranks(small_ranks())


def stream(
    ids: list[int],
    start: Channel = Channel.REASONING,
    stop: tuple[str, ...] = (),
    size: int = 1,
    finish: str = "stop",
    has_calls: bool = False,
) -> tuple[list[Delta], str | None]:
    text_stream = TextStream(TOKENIZER, start, stop, has_calls=has_calls)
    deltas = []
    for position in range(0, len(ids), size):
        deltas += text_stream.push(ids[position : position + size])
    return deltas + text_stream.flush(finish), text_stream.stopped


def test_one_push_joins_the_tokens_of_a_channel() -> None:
    ids = TOKENIZER.encode_markup(f"one two{THINK_END}{RESPONSE}three")
    deltas, _ = stream(ids, size=len(ids))
    assert [(delta.channel, delta.text) for delta in deltas] == [
        (Channel.REASONING, "one two"),
        (Channel.MARKUP, ""),
        (Channel.CONTENT, "three"),
    ]


def test_a_stop_string_counts_in_the_response_but_not_in_the_reasoning() -> None:
    ids = TOKENIZER.encode_markup(f"a END b{THINK_END}{RESPONSE}c END d{RESPONSE_END}")
    deltas, stopped = stream(ids, stop=("END",))
    assert stopped == "END"
    assert (collect(deltas).reasoning, collect(deltas).content) == ("a END b", "c ")


def test_a_stop_string_counts_in_text_without_channels() -> None:
    deltas, stopped = stream(TOKENIZER.encode("one\n\ntwo"), Channel.TEXT, ("\n\n",))
    assert (collect(deltas).content, stopped) == ("one", "\n\n")


def test_a_stop_string_is_found_across_a_dropped_marker() -> None:
    deltas, stopped = stream(TOKENIZER.encode_markup("xE[UNK]NDy"), Channel.CONTENT, ("END",))
    assert (collect(deltas).content, stopped) == ("x", "END")


def test_a_stop_string_ends_text_that_turns_out_to_be_the_answer() -> None:
    ids = TOKENIZER.encode_markup(f"ab END c{RESPONSE_END}")
    deltas, stopped = stream(ids, stop=("END",))
    assert (collect(deltas).reasoning, collect(deltas).content, stopped) == ("", "ab ", "END")
    deltas, stopped = stream(ids, stop=("ab",))
    assert (collect(deltas).reasoning, collect(deltas).content, stopped) == ("", "", "ab")


def test_a_stop_string_is_not_looked_for_in_calls_or_across_them() -> None:
    ids = TOKENIZER.encode_markup(f"{THINK_END}{RESPONSE}ab{TOOLS}{TOOLS_END}cd")
    for stop in ("x", "1", "bc"):
        deltas, stopped = stream(ids, stop=(stop,), has_calls=True)
        assert (collect(deltas).content, stopped) == ("abcd", None)
        assert [call.arguments for call in collect(deltas).calls] == ['{"x": "1"}']
    assert stream(ids, stop=("cd",), has_calls=True)[1] == "cd"


def test_text_held_back_is_given_out_when_a_call_begins() -> None:
    text_stream = TextStream(TOKENIZER, Channel.CONTENT, ("ab",), has_calls=True)
    assert text_stream.push([97]) == []
    deltas = text_stream.push(TOKENIZER.encode_markup(TOOLS))
    assert deltas[0] == Delta(Channel.CONTENT, "a", (97,))


def test_without_tools_a_call_is_markup() -> None:
    ids = TOKENIZER.encode_markup(f"{THINK_END}{RESPONSE}ab{TOOLS}{TOOLS_END}cd")
    deltas, _ = stream(ids)
    assert {delta.channel for delta in deltas} == {Channel.CONTENT, Channel.MARKUP}
    assert (collect(deltas).content, collect(deltas).calls) == ("abcd", ())
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids


def test_tokens_of_the_stop_string_are_not_content() -> None:
    deltas, _ = stream(TOKENIZER.encode("a-END-"), Channel.TEXT, ("END",))
    assert collect(deltas).content_token_ids == (97, 45)
    hello = TOKENIZER.encode("hello")
    assert len(hello) == 1
    deltas, _ = stream([97, *hello, 98], Channel.TEXT, ("lo",))
    assert deltas[1:] == [Delta(Channel.TEXT, "hel", tuple(hello))]


def test_later_ids_are_ignored_after_a_stop_string() -> None:
    text_stream = TextStream(TOKENIZER, Channel.TEXT, ("b",))
    assert text_stream.push([97, 98, 99]) == [Delta(Channel.TEXT, "a", (97,)), Delta(Channel.MARKUP, "", (98,))]
    assert text_stream.push([97]) == []
    assert text_stream.flush("stop") == []
    assert text_stream.stopped == "b"


def test_the_stop_shows_at_once_when_the_token_completes_it() -> None:
    text_stream = TextStream(TOKENIZER, Channel.TEXT, ("ab",))
    assert text_stream.push([97]) == []
    assert text_stream.stopped is None
    text_stream.push([98])
    assert text_stream.stopped == "ab"


def test_held_text_is_flushed_when_no_stop_string_came() -> None:
    deltas, stopped = stream([97, 98, 99], Channel.TEXT, ("bcd",), finish="length")
    assert (collect(deltas).content, stopped) == ("abc", None)
    assert collect(deltas).content_token_ids == (97, 98, 99)


@pytest.mark.parametrize("text", ["a🙂b", "🙂", "你好"])
def test_tokens_that_share_a_character_come_together(text: str) -> None:
    ids = list(text.encode())
    deltas, _ = stream(ids, Channel.TEXT)
    assert "".join(delta.text for delta in deltas) == text
    for delta in deltas:
        assert bytes(delta.token_ids).decode() == delta.text


def naive_stop_between_calls(deltas: list[Delta], stop: tuple[str, ...]) -> tuple[str, str | None]:
    is_content = [delta.channel in (Channel.CONTENT, Channel.TEXT) for delta in deltas]
    content = [delta.text if shown else "" for delta, shown in zip(deltas, is_content, strict=True)]
    borders = [position for position, delta in enumerate(deltas) if delta.channel is Channel.TOOLS]
    before = ""
    for begin, end in pairwise([0, *borders, len(deltas)]):
        part, matched = naive_stop("".join(content[begin:end]), stop)
        before += part
        if matched:
            return before, matched
    return before, None


@given(
    IDS,
    st.sampled_from(STARTS),
    st.lists(st.sampled_from(["x", "think", "n", "xx", "ok", "on", "好\n", "\ufffd", "no", "kr"]), max_size=3).map(
        tuple
    ),
    st.sampled_from(["stop", "length"]),
)
def test_stop_strings_cut_the_content_as_a_search_of_the_whole_would(
    ids: list[int], start: Channel, stop: tuple[str, ...], finish: str
) -> None:
    free, _ = stream(ids, start, (), max(len(ids), 1), finish, has_calls=True)
    expected, matched = naive_stop_between_calls(free, stop)
    reference, stopped = stream(ids, start, stop, 1, finish)
    assert (collect(reference).content, stopped) == (expected, matched)
    assert collect(reference).reasoning == collect(free).reasoning
    consumed = [token_id for delta in reference for token_id in delta.token_ids]
    assert consumed == ids[: len(consumed)]
    assert matched is not None or consumed == ids
    for size in (2, 5, max(len(ids), 1)):
        deltas, stopped = stream(ids, start, stop, size, finish)
        assert stopped == matched
        assert collect(deltas) == collect(reference)
