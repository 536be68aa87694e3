from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.text import tokenizer as module
from perilune.text.tokenizer import Detokenizer, Tokenizer

from .conftest import small_ranks

SMALL = Tokenizer.from_ranks(small_ranks())

VECTORS = {
    "Hello, how are you?": [19180, 11, 1632, 554, 398, 30],
    "你好": [33845],
    "message": [2778],
    "think": [39964],
    "response": [12092],
    "tools": [25385],
    "call": [10257],
    "argument": [47185],
    "json": [5534],
    " role": [6244],
    " type": [1798],
    " name": [1530],
    " tool": [4453],
    " index": [4002],
    " key": [2355],
    '="': [878],
    '"': [1],
    "user": [2482],
    "system": [14062],
    "assistant": [69702],
    "tool": [20960],
    "tool-declare": [20960, 120083, 677],
    "thinking-effort": [130400, 59991, 470],
    "tool-choice": [20960, 135230],
    "response-format": [12092, 46906],
    "string": [2033],
    "number": [10006],
    "boolean": [16849],
    "null": [6562],
    "object": [3721],
    "array": [4392],
    "low": [1332],
    "high": [19421],
    "max": [5354],
    "1": [16],
    "2": [17],
    "10": [795],
    "12345678": [6694, 12972, 4447],
    "hi": [9663],
    "hello": [22931],
    "don't": [88709],
    "\n": [198],
    "\n\n": [382],
    "  x": [220, 1288],
    "<think>": [27, 39964, 29],
    "functions.get_weather:0": [41937, 1150, 21055, 2800, 25, 15],
    "🙂": [5885, 46813],
    "<|close|>": [27, 91, 10794, 91, 29],
    "<|open|>": [27, 91, 4454, 91, 29],
    "<|sep|>": [27, 91, 40433, 91, 29],
    "<|media_pad|>": [27, 91, 13634, 49974, 91, 29],
}

# Text that likes to spell control tokens and to break characters, words and lines.
SPELLINGS = st.sampled_from(
    [*list(SMALL.special_ids)[:12], "<|", "|>", "open", "你好", "🙂", "\r\n", "  ", "'s", "123"]
)
TEXTS = st.lists(st.one_of(SPELLINGS, st.text(max_size=8)), max_size=12).map("".join)


@pytest.mark.parametrize("text", VECTORS)
def test_released_vocabulary_gives_the_known_ids(kimi_tokenizer: Tokenizer, text: str) -> None:
    assert kimi_tokenizer.encode(text) == VECTORS[text]
    assert kimi_tokenizer.decode(VECTORS[text]) == text


def test_markup_gives_control_ids(kimi_tokenizer: Tokenizer) -> None:
    text = 'hi<|end_of_msg|><|open|>message role="system"<|sep|>obey'
    ids = [9663, 163586, 163587, 2778, 6244, 878, 14062, 1, 163589, 1031, 2025]
    assert kimi_tokenizer.encode_markup(text) == ids
    assert kimi_tokenizer.decode(ids) == text
    assert kimi_tokenizer.decode(ids, skip_special=True) == 'hi<|open|>message role="system"<|sep|>obey'


@given(TEXTS)
def test_content_survives_and_never_becomes_a_control_token(text: str) -> None:
    ids = SMALL.encode(text)
    assert all(token_id < SMALL.num_ranks for token_id in ids)
    assert SMALL.decode(ids) == text


@given(TEXTS)
def test_markup_decodes_to_what_was_encoded(text: str) -> None:
    assert SMALL.decode(SMALL.encode_markup(text)) == text


def test_markup_is_seen_inside_a_word() -> None:
    assert SMALL.encode_markup("a<|sep|>b") == [97, SMALL.sep_id, 98]


@given(st.lists(st.tuples(st.sampled_from("ab \n你"), st.integers(1, 9)), max_size=9))
def test_cut_agrees_with_counting_character_by_character(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * count for character, count in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_PIECE_CHARS", 20)
        patch.setattr(module, "MAX_RUN_CHARS", 4)
        assert list(module.cut(text)) == list(cut_by_counting(text, 20, 4))


def cut_by_counting(text: str, piece_chars: int, run_chars: int) -> Iterator[str]:
    for start in range(0, len(text), piece_chars):
        part = text[start : start + piece_chars]
        piece, run = part[0], 1
        for before, character in pairwise(part):
            run = run + 1 if before.isspace() == character.isspace() else 1
            if run > run_chars:
                yield piece
                piece, run = "", 1
            piece += character
        yield piece


@pytest.mark.parametrize(
    ("character", "count"),
    [(" ", 1_000_000), ("\n", 1_000_000), ("a", 1_000_000), ("\u3000", 100_000), ("🙂", 100_000)],
)
def test_a_million_equal_characters_are_encoded(character: str, count: int) -> None:
    ids = SMALL.encode(character * count)
    assert b"".join(map(SMALL.token_bytes, ids)) == (character * count).encode()


def test_a_run_is_cut_where_the_released_tokenizer_cuts_it(kimi_tokenizer: Tokenizer) -> None:
    whole = kimi_tokenizer.encode("a" * 25_003)
    assert whole == kimi_tokenizer.encode("a" * 25_000) + kimi_tokenizer.encode("aaa")


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\udc00\ud800"])
def test_lone_surrogates_are_a_request_error(text: str) -> None:
    with pytest.raises(RequestError, match=r"the text holds the lone surrogate U\+D[89CF]"):
        SMALL.encode(text)


class Panic(BaseException):
    pass


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(Panic, RequestError), (ValueError, RequestError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_a_panic_of_the_library_fails_the_request_alone(
    raised: type[BaseException], expected: type[BaseException]
) -> None:
    class Broken:
        def encode_ordinary(self, text: str) -> list[int]:
            raise raised("stack")

    tokenizer = Tokenizer.from_ranks(small_ranks())
    tokenizer._bpe = Broken()
    with pytest.raises(expected):
        tokenizer.encode("text")


def test_ids_outside_the_vocabulary_have_no_bytes() -> None:
    assert SMALL.token_bytes(SMALL.vocab_size) == b""
    assert SMALL.token_bytes(SMALL.sep_id) == b"<|sep|>"
    assert SMALL.is_special(SMALL.vocab_size)
    with pytest.raises(RequestError, match="token id -1 is negative"):
        SMALL.token_bytes(-1)


BYTES = st.one_of(st.binary(max_size=24), st.text(max_size=8).map(str.encode))


@given(BYTES, st.data())
def test_any_split_of_the_ids_gives_the_same_text(raw: bytes, data: st.DataObject) -> None:
    ids = list(raw)
    detokenizer = Detokenizer(SMALL)
    text = ""
    while ids:
        size = data.draw(st.integers(0, len(ids)))
        text += detokenizer.push(ids[:size])
        ids = ids[size:]
        if size == 0:
            text += detokenizer.push(ids[:1])
            ids = ids[1:]
    assert text + detokenizer.flush() == raw.decode(errors="replace")


@given(st.text(max_size=12))
def test_at_most_three_bytes_are_held_and_valid_text_is_never_replaced(text: str) -> None:
    detokenizer = Detokenizer(SMALL)
    shown = ""
    for count, value in enumerate(text.encode(), start=1):
        shown += detokenizer.push([value])
        assert count - len(shown.encode()) <= 3
        assert text.startswith(shown)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("raw", [b"\x80", b"\xff", b"\xc0", b"\xe0\x80", b"\xed\xa0", b"\xf4\x90", b"\xf0\x9f\x99a"])
def test_bytes_that_can_never_become_a_character_are_not_held(raw: bytes) -> None:
    assert Detokenizer(SMALL).push(raw) == raw.decode(errors="replace")


@settings(max_examples=50)
@given(st.lists(st.integers(0, SMALL.vocab_size + 40), max_size=20))
def test_any_ids_decode(ids: list[int]) -> None:
    detokenizer = Detokenizer(SMALL)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == SMALL.decode(ids)


def test_a_control_token_ends_a_character() -> None:
    ids = [*"🙂".encode()[:2], SMALL.sep_id, *"🙂".encode()[2:]]
    assert SMALL.decode(ids) == "\ufffd<|sep|>\ufffd\ufffd"
    hidden = [*ids[:2], SMALL.end_of_msg_id, *ids[3:]]
    assert SMALL.decode(hidden, skip_special=True) == "\ufffd\ufffd\ufffd"
    assert SMALL.decode(ids, skip_special=True) == SMALL.decode(ids)
