"""Tool calls in the model's output: the vectors of the format, and streaming against whole under any cuts."""

import json
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.text.channels import Channel, Delta, Transcript, collect
from perilune.text.prompt.calls import parse_tool_calls, tools_channel
from perilune.text.prompt.segments import close_message, element, encode_segments
from perilune.text.stream import TextStream
from perilune.text.tokenizer import Tokenizer

from .call_vectors import CALL, CUT, CUT_CALL, NATURAL, VECTORS, Vector, argument, call, tools
from .conftest import small_ranks
from .test_calls import TEXT, VALUES
from .test_parser import STARTS, C, E, O, S

TOKENIZER = Tokenizer.from_ranks(small_ranks())


@dataclass
class Heard:
    """What a client of the stream puts together, knowing nothing of ends and second thoughts."""

    reasoning: str = ""
    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def hear(self, delta: Delta) -> None:
        if delta.call is not None and delta.call.name is not None:
            assert (delta.call.index, delta.text) == (len(self.names), "")
            self.names.append(delta.call.name)
            self.arguments.append("")
        elif delta.call is not None:
            assert delta.call.index == len(self.names) - 1
            assert delta.text
            self.arguments[-1] += delta.text
        elif delta.channel is Channel.REASONING:
            self.reasoning += delta.text
        else:
            self.content += delta.text


def parse(ids: list[int], cuts: list[int], start: Channel, finish: str) -> tuple[Transcript, Heard]:
    """The generation in pieces that end at the cuts, as a whole and as a client hears it."""
    stream = TextStream(TOKENIZER, start, has_calls=True)
    deltas = []
    for begin, end in pairwise([0, *sorted(cuts), len(ids)]):
        deltas += stream.push(ids[begin:end])
    deltas += stream.flush(finish)
    heard = Heard()
    for delta in deltas:
        heard.hear(delta)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == ids
    return collect(deltas), heard


def check_agreement(ids: list[int], cuts: list[int], start: Channel, finish: str) -> Transcript:
    """The same comes out for any cuts, and a client hears the same, but for the call that was cut."""
    whole, heard = parse(ids, [], start, finish)
    assert parse(ids, cuts, start, finish) == (whole, heard)
    assert parse(ids, list(range(len(ids))), start, finish) == (whole, heard)
    assert heard.content == whole.content
    assert heard.reasoning.startswith(whole.reasoning)
    calls = list(zip(heard.names, heard.arguments, strict=True))
    assert calls[: len(whole.calls)] == [(call.name, call.arguments) for call in whole.calls]
    assert len(calls) - len(whole.calls) in (0, 1)
    return whole


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_calls_are_the_same_streamed_and_whole(vector: Vector) -> None:
    ids = TOKENIZER.encode_markup(vector.output)
    for size in (2, 3, 7, 50):
        whole = check_agreement(ids, list(range(0, len(ids), size)), vector.start, vector.finish)
        calls = [(call.name, call.arguments) for call in whole.calls]
        assert (whole.reasoning, whole.content, calls) == (vector.reasoning, vector.content, vector.calls)


def test_an_argument_that_spells_a_marker_is_kept_whole() -> None:
    spelt = f"a{C}argument{S}{O}call{E}b"
    before, _, after = tools(call("f", argument("x", "string", "HERE"))).partition("HERE")
    ids = [*TOKENIZER.encode_markup(before), *TOKENIZER.encode(spelt), *TOKENIZER.encode_markup(after)]
    whole = check_agreement(ids, [], Channel.REASONING, NATURAL)
    assert [json.loads(call.arguments) for call in whole.calls] == [{"x": spelt}]


def test_the_name_comes_at_once_and_a_string_as_it_is_made() -> None:
    stream = TextStream(TOKENIZER, Channel.TOOLS, has_calls=True)
    texts = []
    for token_id in TOKENIZER.encode_markup(
        call("get_tide", argument("port", "string", "B\n"), argument("n", "array", "[1]"))
    ):
        for delta in stream.push([token_id]):
            if delta.call is not None:
                texts.append(delta.call.name or delta.text)
    assert texts == ["get_tide", '{"port": "', "B", "\\n", '"', ', "n": ', "[1]", "}"]


def test_a_cut_string_has_been_streamed_as_far_as_it_came() -> None:
    whole, heard = parse(TOKENIZER.encode_markup(CUT_CALL), [], Channel.TOOLS, CUT)
    assert (whole.calls, heard.names, heard.arguments) == ((), ["g"], ['{"y": "ab'])


def test_a_character_cut_by_the_end_of_an_argument_is_replaced_in_it() -> None:
    before, _, after = CALL.partition(f"1{C}argument")
    ids = [*TOKENIZER.encode_markup(before), 0xF0, 0x9F, *TOKENIZER.encode_markup(f"{C}argument{after}")]
    whole = check_agreement(ids, [], Channel.TOOLS, NATURAL)
    assert [call.arguments for call in whole.calls] == ['{"x": "\ufffd"}']


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ANSWERS = st.tuples(
    TEXT,
    TEXT,
    st.lists(st.tuples(NAMES, st.dictionaries(TEXT, VALUES, max_size=3)), max_size=3),
)


def answer_ids(reasoning: str, content: str, calls: list[tuple[str, dict[str, object]]]) -> list[int]:
    """An answer as the conversation shows it to the model later."""
    given = [
        {"id": str(number), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(calls)
    ]
    # the opener of the reasoning belongs to the prompt
    segments = [*element("think", reasoning)[3:], *element("response", content)]
    segments += [*tools_channel(parse_tool_calls(given, "tool_calls")), *close_message()]
    return encode_segments(segments, TOKENIZER)


@given(ANSWERS, st.data())
def test_an_answer_written_into_a_conversation_is_read_back(
    answer: tuple[str, str, list[tuple[str, dict[str, object]]]], data: st.DataObject
) -> None:
    ids = answer_ids(*answer)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    whole = check_agreement(ids, cuts, Channel.REASONING, NATURAL)
    assert (whole.reasoning, whole.content) == answer[:2]
    calls = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in answer[2]]
    assert [(call.name, call.arguments) for call in whole.calls] == calls


TAGS = (
    "think",
    "response",
    "message",
    "tools",
    'call tool="f"',
    'argument key="k" type="number"',
    "json",
    "argument",
    "call",
)
INSERTED = st.one_of(
    st.sampled_from([O, C, S, E, "[UNK]", *TAGS, *(f"{O}{tag}{S}" for tag in TAGS)]).map(TOKENIZER.encode_markup),
    st.integers(0, TOKENIZER.vocab_size + 9).map(lambda token_id: [token_id]),
)


@st.composite
def mutated(draw: st.DrawFn) -> list[int]:
    """An answer with some of it lost, doubled or replaced by what does not belong there."""
    ids = draw(
        ANSWERS.map(lambda answer: answer_ids(*answer))
        | st.sampled_from(VECTORS).map(lambda vector: TOKENIZER.encode_markup(vector.output))
    )
    for _ in range(draw(st.integers(1, 6))):
        begin = draw(st.integers(0, len(ids)))
        end = min(len(ids), begin + draw(st.integers(0, 12)))
        middle = draw(st.one_of(INSERTED, st.just([]), st.just(ids[begin:end] * 2)))
        ids = [*ids[:begin], *middle, *ids[end:]]
    return ids[: draw(st.integers(0, len(ids)))] if draw(st.booleans()) else ids


@given(
    mutated(),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from(STARTS),
    st.sampled_from([NATURAL, CUT, "abort"]),
)
def test_whatever_the_model_makes_is_the_same_streamed_and_whole(
    ids: list[int], cuts: list[int], start: Channel, finish: str
) -> None:
    whole = check_agreement(ids, [min(cut, len(ids)) for cut in cuts], start, finish)
    has_block = TOKENIZER.decode(ids).count("json") > 0
    for made in whole.calls:
        assert made.name
        assert has_block or isinstance(json.loads(made.arguments), dict)
