import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.text.calls import CallWriter

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
KINDS = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    type(None): "null",
    dict: "object",
    list: "array",
}
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=False), TEXT)
FINITE = SCALARS.filter(lambda value: not isinstance(value, float) or abs(value) != float("inf"))
VALUES = st.recursive(
    FINITE, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)), max_leaves=8
)


def written(*arguments: tuple[str, str | None, str], size: int = 1) -> str:
    """Arguments given as (key, type, text), the text coming in pieces of `size`."""
    writer = CallWriter(0)
    parts = []
    for key, kind, text in arguments:
        parts.append(writer.begin_argument({"key": key} | ({} if kind is None else {"type": kind})))
        parts += [writer.push(text[start : start + size]) for start in range(0, len(text), size)]
        parts.append(writer.end_value())
    return "".join([*parts, writer.close()])


@given(st.dictionaries(TEXT, VALUES, max_size=4), st.integers(1, 9))
def test_arguments_come_out_as_they_were_meant(arguments: dict[str, object], size: int) -> None:
    texts = [
        (key, KINDS[type(value)], value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
        for key, value in arguments.items()
    ]
    assert written(*texts, size=size) == json.dumps(arguments, ensure_ascii=False)


def test_a_string_is_written_as_it_comes() -> None:
    writer = CallWriter(0)
    assert writer.begin_argument({"key": "k", "type": "string"}) == '{"k": "'
    assert [writer.push(text) for text in ('a"', "\n", "好")] == ['a\\"', "\\n", "好"]
    assert (writer.end_value(), writer.close()) == ('"', "}")


def test_other_types_are_written_when_they_end() -> None:
    writer = CallWriter(0)
    assert writer.begin_argument({"key": "k", "type": "array"}) == '{"k": '
    assert [writer.push(text) for text in ("[1,", "2]")] == ["", ""]
    assert (writer.end_value(), writer.close()) == ("[1, 2]", "}")


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("number", "1e2x", '"1e2x"'),
        ("number", " 12\n", "12"),
        ("number", "NaN", '"NaN"'),
        ("number", "-Infinity", '"-Infinity"'),
        ("number", "1e999", '"1e999"'),
        ("number", "9" * 5000, f'"{"9" * 5000}"'),
        ("number", "", '""'),
        ("boolean", "true", "true"),
        ("null", "null", "null"),
        ("object", '{"b":1,"a":[]}', '{"b": 1, "a": []}'),
        ("object", "[" * 100_000, f'"{"[" * 100_000}"'),
        ("integer", "7", "7"),
        ("string", "7", '"7"'),
        (None, "7", '"7"'),
    ],
)
def test_a_value_has_the_type_it_is_said_to_have_or_is_a_string(kind: str | None, text: str, value: str) -> None:
    assert written(("k", kind, text), size=len(text) or 1) == f'{{"k": {value}}}'


def test_half_a_character_is_replaced() -> None:
    assert written(("k", "array", r'["\ud83d", "\ud83d\ude42"]')) == '{"k": ["\ufffd", "🙂"]}'


def test_of_two_arguments_with_one_key_the_last_counts() -> None:
    text = written(("k", "number", "1"), ("k", "number", "2"))
    assert json.loads(text) == {"k": 2}


def test_an_argument_without_a_key_is_dropped() -> None:
    writer = CallWriter(0)
    assert writer.begin_argument({"type": "string"}) + writer.push("x") + writer.end_value() == ""
    assert writer.close() == "{}"


def blocks(*texts: str) -> CallWriter:
    writer = CallWriter(0)
    for text in texts:
        writer.begin_block()
        assert writer.push(text) + writer.end_value() == ""
    return writer


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ('{"a":[1,2]}', '{"a": [1, 2]}'),
        ("{a: 1}", "{a: 1}"),
        ("[1,2]", "[1,2]"),
        (" \n", "{}"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_a_block_alone_is_all_arguments(raw: str, arguments: str) -> None:
    assert blocks(raw).close() == arguments


def test_a_block_counts_only_alone() -> None:
    assert blocks('{"a": 1}', '{"b": 1}').close() == "{}"
    writer = blocks('{"a": 1}')
    assert writer.begin_argument({"key": "k"}) + writer.push("x") + writer.close() == '{"k": "x"}'


def test_closing_a_call_closes_what_is_open_in_it() -> None:
    for kind, rest in (("string", '"}'), ("number", "7}")):
        writer = CallWriter(0)
        writer.begin_argument({"key": "k", "type": kind})
        writer.push("7")
        assert writer.close() == rest
    writer = CallWriter(0)
    writer.begin_block()
    writer.push('{"a":1}')
    assert writer.close() == '{"a": 1}'
