"""A prompt that cannot fit is refused before it is encoded, and no prompt that fits is."""

import pytest

from perilune.errors import RequestError
from perilune.text.encoding import encode_chat
from perilune.text.prompt.room import TOLD_EXACTLY_BYTES, Room
from perilune.text.tokenizer import Tokenizer

LONGEST = b"x" * 32
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def tokenizer():
    ranks = {bytes([value]): value for value in range(256)}
    for power in (2, 4, 8, 16, 32):
        ranks[LONGEST[:power]] = len(ranks)
    return Tokenizer.from_ranks(ranks)


@pytest.fixture
def untouched(tokenizer, monkeypatch):
    """The tokenizer, which must not be asked to encode anything."""

    def fail(*_):
        raise AssertionError("was encoded")

    monkeypatch.setattr(tokenizer, "encode", fail)
    return tokenizer


def refusal(take):
    with pytest.raises(RequestError) as raised:
        take()
    assert raised.value.code == "context_length_exceeded"
    return raised.value


@pytest.mark.parametrize("counts_only", [False, True])
def test_text_of_more_bytes_than_the_context_can_hold_is_refused_unencoded(untouched, counts_only):
    room = Room(500, untouched, counts_only=counts_only)
    long = {"role": "user", "content": "y" * (500 * len(LONGEST))}
    error = refusal(lambda: encode_chat([USER, long, USER], untouched, room=room))
    assert error.param == "messages[1]"
    assert "500 tokens holds at most 16000 bytes" in str(error)


def test_text_that_fills_the_context_to_the_last_byte_is_taken(tokenizer):
    text = LONGEST.decode() * 100
    room = Room(100, tokenizer)
    room.take(text, "prompt")
    assert len(tokenizer.encode(text, room.at_most)) == 100
    refusal(lambda: room.take("x", "prompt"))


def test_names_of_control_tokens_are_counted_as_tokens_too():
    short = Tokenizer.from_ranks({bytes([value]): value for value in range(256)})
    text = "<|reserved_token_400|>" * 50
    room = Room(50, short)
    room.take(text, "prompt")
    assert len(short.encode_markup(text, room.at_most)) == 50


def test_a_history_of_more_pieces_than_the_context_has_tokens_is_refused_unencoded(untouched):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {f"k{n}": 1 for n in range(200)}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    error = refusal(lambda: encode_chat(messages, untouched, room=Room(1000, untouched, counts_only=True)))
    assert error.param == "messages[1]"
    assert "1000 tokens" in str(error)


def test_encoding_stops_where_the_context_ends_unless_tokens_are_only_counted(tokenizer):
    message = {"role": "user", "content": "y" * 900_000}
    error = refusal(lambda: encode_chat([message], tokenizer, room=Room(50_000, tokenizer)))
    assert error.param == "messages[0]"
    counted = encode_chat([message], tokenizer, room=Room(50_000, tokenizer, counts_only=True))
    assert len(counted.token_ids) > 900_000


def test_a_prompt_that_is_a_little_too_long_is_counted_so_that_the_error_can_say_by_how_much(tokenizer):
    message = {"role": "user", "content": "y" * (TOLD_EXACTLY_BYTES // 2)}
    assert len(encode_chat([message], tokenizer, room=Room(50_000, tokenizer)).token_ids) > TOLD_EXACTLY_BYTES // 2


def test_the_longest_field_is_named_whatever_comes_last(untouched):
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 15_000}}]
    error = refusal(lambda: encode_chat([USER] * 9, untouched, tools=tools, room=Room(380, untouched)))
    assert error.param == "tools"
