from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.text.channels import Channel, Delta, collect, merge_deltas
from perilune.text.header import MAX_HEADER_BYTES
from perilune.text.parser import ChannelParser
from perilune.text.tokenizer import Tokenizer

from .conftest import small_ranks

TOKENIZER = Tokenizer.from_ranks(small_ranks())
O, C, S, E = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"  # noqa: E741
THINK_END = f"{C}think{S}"
RESPONSE = f"{O}response{S}"
RESPONSE_END = f"{C}response{S}"
MESSAGE_END = f"{C}message{S}{E}"
TOOLS = f'{O}tools{S}{O}call tool="f" index="1"{S}{O}argument key="x" type="string"{S}1{C}argument{S}{C}call{S}'
TOOLS_END = f"{C}tools{S}"


@dataclass(frozen=True)
class Vector:
    name: str
    output: str
    reasoning: str
    content: str
    finish: str = "stop"
    start: Channel = Channel.REASONING


VECTORS = [
    Vector("reasoning and response", f"a{THINK_END}{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "a", "b"),
    Vector("echoed opener", f"{O}think{S}a{THINK_END}{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "a", "b"),
    Vector("tools without think closer", f"a{TOOLS}{TOOLS_END}{MESSAGE_END}", "a", ""),
    Vector("think closer without separator", f"a{C}think{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "a", "b"),
    Vector("think closer without separator at the end", f"a{C}think{E}", "a", ""),
    Vector("thinking skipped", f"b{RESPONSE_END}{MESSAGE_END}", "", "b"),
    Vector("thinking skipped, message closed", f"b{MESSAGE_END}", "", "b"),
    Vector("thinking skipped, then more", f"b{RESPONSE_END}c{MESSAGE_END}", "", "bc"),
    Vector("thinking skipped, cut in the closer", f"b{C}response", "", "b", "length"),
    Vector("cut in the reasoning", "abc", "abc", "", "length"),
    Vector("aborted in the reasoning", "abc", "abc", "", "abort"),
    Vector("no marker and a natural stop", "abc", "", "abc"),
    Vector("no marker but the end", f"abc{E}", "", "abc"),
    Vector("echoed opener and a natural stop", f"{O}think{S}abc{E}", "abc", ""),
    Vector("response without think marker", f"{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "", "b"),
    Vector("reasoning ended by the response", f"a{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "a", "b"),
    Vector("cut in the response", f"{THINK_END}{RESPONSE}b", "", "b", "length"),
    Vector(
        "whitespace is exact", f" a\n{THINK_END}\n{RESPONSE}\n\n b \n{RESPONSE_END}\n{MESSAGE_END}", " a\n", "\n\n b \n"
    ),
    Vector("text between channels", f"a{THINK_END}\n b \n{RESPONSE}c{RESPONSE_END}{MESSAGE_END}", "a", "\n b \nc"),
    Vector("blanks between channels", f"a{THINK_END} \n{RESPONSE}c{RESPONSE_END} \n{MESSAGE_END}", "a", "c"),
    Vector("blanks and a stray marker between channels", f"a{THINK_END} {S}\n b{MESSAGE_END}", "a", " \n b"),
    Vector("response not closed before tools", f"a{THINK_END}{RESPONSE}b{TOOLS}{TOOLS_END}{MESSAGE_END}", "a", "b"),
    Vector("content after tools", f"a{THINK_END}{TOOLS}{TOOLS_END}b{MESSAGE_END}", "a", "b"),
    Vector("tools not closed before the response", f"a{THINK_END}{TOOLS}{RESPONSE}b{MESSAGE_END}", "a", "b"),
    Vector("tools cut", f"a{THINK_END}{RESPONSE}b{RESPONSE_END}{TOOLS}", "a", "b", "length"),
    Vector("unknown tag", f'a{THINK_END}{RESPONSE}b{O}note x="1"{S}c{C}note{S}d{RESPONSE_END}', "a", "bcd"),
    Vector("unknown tag in the reasoning", f"a{O}note{S}b{C}note{S}c{THINK_END}{RESPONSE}d", "abc", "d"),
    Vector("stray opener", f"{THINK_END}{RESPONSE}a{O} b c{RESPONSE_END}", "", "a b c"),
    Vector("stray opener at the end", f"{THINK_END}{RESPONSE}a{O}<b>", "", "a<b>"),
    Vector(
        "stray opener before a long text",
        f"{THINK_END}{RESPONSE}{O}{'é' * MAX_HEADER_BYTES}",
        "",
        "é" * MAX_HEADER_BYTES,
    ),
    Vector("stray opener before the name of a tag", f"{THINK_END}{RESPONSE}a{O}call me{C}response{S}", "", "acall me"),
    Vector("opener without separator before text", f"a{THINK_END}{O}response b{RESPONSE_END}", "a", "response b"),
    Vector("cut inside a tag", f"a{THINK_END}{O}resp", "a", "", "length"),
    Vector("cut inside an attribute", f'a{THINK_END}{O}message role="assi', "a", "", "length"),
    Vector("cut right after a marker", f"a{THINK_END}{O}", "a", "", "length"),
    Vector("two markers in a row", f"a{O}{C}think{S}{O}{O}response{S}b", "a", "b"),
    Vector("later think opener", f"a{THINK_END}{O}think{S}{RESPONSE}b{RESPONSE_END}", "a", "b"),
    Vector("control token inside a tag", f"a{C}th[UNK]ink{S}{RESPONSE}b", "a", "b"),
    Vector("control tokens in text are hidden", f"a[BOS]b{THINK_END}{RESPONSE}c<|media_pad|>d", "ab", "cd"),
    Vector("text after the end", f"a{THINK_END}{RESPONSE}b{MESSAGE_END}more", "a", "b"),
    Vector("another safe end", f"a{THINK_END}{RESPONSE}b[EOS]", "a", "b"),
    Vector("thinking off", f"b{RESPONSE_END}{TOOLS}{TOOLS_END}{MESSAGE_END}", "", "b", start=Channel.CONTENT),
    Vector("thinking off, cut", "b", "", "b", "length", Channel.CONTENT),
    Vector("thinking off, response opened again", f"{RESPONSE}b{RESPONSE_END}", "", "b", start=Channel.CONTENT),
    Vector("no channels", f"a{O}think{S}b{E}", "", "a<|open|>think<|sep|>b", start=Channel.TEXT),
    Vector("called outside the tools channel", f'a{O}call tool="f"{S}b{C}call{S}{C}tools{S}c', "a", "c"),
    Vector("call without a name outside the tools channel", f"{RESPONSE}a{O}call{S}b", "", "ab"),
    Vector("started in the tools channel", f"a{TOOLS}{TOOLS_END}{MESSAGE_END}", "", "", start=Channel.TOOLS),
    Vector("nothing", "", "", ""),
]


def parse(ids: list[int], vector: Vector, size: int) -> list[Delta]:
    parser = ChannelParser(TOKENIZER, vector.start)
    deltas = []
    for start in range(0, len(ids), size):
        deltas += parser.push(ids[start : start + size])
    return deltas + parser.flush(vector.finish)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_every_chunking_gives_reasoning_and_content(vector: Vector) -> None:
    ids = TOKENIZER.encode_markup(vector.output)
    whole = parse(ids, vector, max(len(ids), 1))
    transcript = collect(whole)
    assert (transcript.reasoning, transcript.content) == (vector.reasoning, vector.content)
    assert [token_id for delta in whole for token_id in delta.token_ids] == ids
    for size in range(1, min(len(ids), 40)):
        assert parse(ids, vector, size) == whole


def test_text_that_spells_a_marker_is_text() -> None:
    spelt = f"{C}think{S}{RESPONSE}"
    ids = [*TOKENIZER.encode(spelt), *TOKENIZER.encode_markup(THINK_END + RESPONSE), *TOKENIZER.encode(spelt + E)]
    transcript = collect(parse(ids, Vector("", "", "", ""), 1))
    assert (transcript.reasoning, transcript.content) == (spelt, spelt + E)


def test_released_ids_split_the_same_way(kimi_tokenizer: Tokenizer) -> None:
    ids = kimi_tokenizer.encode_markup(f"想一想🙂{THINK_END}{RESPONSE}你好🙂{RESPONSE_END}{MESSAGE_END}")
    parser = ChannelParser(kimi_tokenizer, Channel.REASONING)
    transcript = collect([delta for token_id in ids for delta in parser.push([token_id])] + parser.flush("stop"))
    assert (transcript.reasoning, transcript.content) == ("想一想🙂", "你好🙂")


def test_a_character_cut_by_a_marker_is_replaced_in_its_own_channel() -> None:
    ids = [*"🙂".encode()[:3], *TOKENIZER.encode_markup(THINK_END + RESPONSE), *"🙂".encode()[:1]]
    assert merge_deltas(parse(ids, Vector("", "", "", "", "length"), 1)) == [
        Delta(Channel.REASONING, "\ufffd", tuple(ids[:3])),
        Delta(Channel.MARKUP, "", tuple(ids[3:-1])),
        Delta(Channel.CONTENT, "\ufffd", tuple(ids[-1:])),
    ]


def test_reasoning_that_was_the_answer_is_given_again_as_content() -> None:
    ids = TOKENIZER.encode_markup(f"hello{RESPONSE_END}")
    deltas = merge_deltas(parse(ids, Vector("", "", "", ""), 1))
    assert [(delta.channel, delta.text, delta.is_resent) for delta in deltas] == [
        (Channel.REASONING, "hello", False),
        (Channel.CONTENT, "hello", True),
        (Channel.MARKUP, "", False),
    ]


TAG_TEXTS = ("think", "response", "message", "tools", "call", "note", " ", "\n", "x", "你好", 'call tool="f"')
STARTS = (Channel.TEXT, Channel.REASONING, Channel.CONTENT, Channel.TOOLS)
PIECES = st.sampled_from([O, C, S, E, "[UNK]", *TAG_TEXTS])
IDS = st.lists(
    st.one_of(PIECES.map(TOKENIZER.encode_markup), st.integers(0, TOKENIZER.vocab_size + 9).map(lambda i: [i])),
    max_size=40,
).map(lambda lists: [token_id for ids in lists for token_id in ids])


@given(IDS, st.sampled_from(STARTS), st.sampled_from(["stop", "length"]))
def test_any_ids_are_parsed_alike_in_every_chunking(ids: list[int], start: Channel, finish: str) -> None:
    vector = Vector("", "", "", "", finish, start)
    whole = parse(ids, vector, max(len(ids), 1))
    assert [token_id for delta in whole for token_id in delta.token_ids] == ids
    for size in (1, 2, 3, 7):
        assert parse(ids, vector, size) == whole
    assert all(delta.text == "" for delta in whole if delta.channel is Channel.MARKUP)
    content = "".join(delta.text for delta in whole if delta.channel in (Channel.CONTENT, Channel.TEXT))
    assert collect(whole).content == content
