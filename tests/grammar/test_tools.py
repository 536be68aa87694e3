"""Arguments of calls against the schemas of their tools."""

import pytest

from perilune.grammar.answer import chat_grammar
from perilune.text.encoding import encode_chat
from tests.grammar.conftest import END_TOOLS, OPEN_TOOLS, THINK_END, USER, call, refused, tool

START = f"{THINK_END}{OPEN_TOOLS}"


@pytest.fixture
def takes(follow):
    """Whether arguments obey the schema of the one tool of a request that demands a call."""

    def check(schema, *arguments, **more):
        text = START + call("f", *arguments) + END_TOOLS
        return follow(text, tools=[tool("f", schema, **more)], tool_choice="required") is None

    return check


def of(value, **more):
    return {"type": "object", "properties": {"k": value}, "required": ["k"], **more}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, [("string", 'raw "text" & <b>\n')], [("number", "1")]),
        (
            {"type": "string", "minLength": 2, "maxLength": 3},
            [("string", "你好"), ("string", "abc")],
            [("string", "a"), ("string", "abcd")],
        ),
        ({"type": "string", "pattern": "^a[0-9]+$"}, [("string", "a12")], [("string", "a"), ("string", "xa1")]),
        ({"type": "string", "pattern": "b"}, [("string", "abc"), ("string", "b")], [("string", "ac")]),
        ({"type": "string", "format": "date"}, [("string", "2026-12-01")], [("string", "2026-13-01")]),
        ({"type": "integer"}, [("number", "-7")], [("number", "1.5"), ("number", "007"), ("string", "7")]),
        (
            {"type": "number", "minimum": 0},
            [("number", "0.25")],
            [("number", "-1"), ("number", "NaN"), ("number", "1e999")],
        ),
        ({"type": ["string", "null"]}, [("string", "null"), ("null", "null")], [("boolean", "true")]),
        (
            {"enum": ["é", 'q"', 3, None]},
            [("string", "é"), ("string", 'q"'), ("number", "3"), ("null", "null")],
            [("string", "3"), ("number", "4")],
        ),
        ({"const": {"a": [1]}}, [("object", '{"a": [1]}')], [("object", '{"a": [2]}')]),
        (
            {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "integer"}}]},
            [("boolean", "true"), ("array", "[1, 2]")],
            [("array", '["x"]')],
        ),
        ({"$ref": "#/$defs/tree"}, [("object", '{"next": {"next": {}}}')], [("object", '{"next": 1}')]),
        ({"type": "string", "description": "d", "default": "x"}, [("string", "")], [("null", "null")]),
        ({}, [("string", "x"), ("object", '{"a": 1}'), ("boolean", "false")], [("object", "[1]")]),
    ],
)
def test_each_kind_of_argument_takes_what_its_schema_allows(takes, schema, good, bad):
    definitions = {
        "tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
    }
    for kind, text in good:
        assert takes(of(schema, **{"$defs": definitions}), ("k", kind, text)), (kind, text)
    for kind, text in bad:
        assert not takes(of(schema, **{"$defs": definitions}), ("k", kind, text)), (kind, text)


def test_a_lone_negative_minimum_does_not_take_a_bare_minus(takes):
    assert takes(of({"type": "integer", "minimum": -5}), ("k", "number", "-5"))
    assert not takes(of({"type": "integer", "minimum": -5}), ("k", "number", "-"))


def test_arguments_come_in_declared_order_required_ones_always_optional_ones_perhaps(takes):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "null"}, "c": {"type": "null"}},
        "required": ["a", "c"],
    }
    a, b, c = ("a", "string", "x"), ("b", "null", "null"), ("c", "null", "null")
    assert takes(schema, a, b, c)
    assert takes(schema, a, c)
    assert not takes(schema, a, b)
    assert not takes(schema, c, a)
    assert not takes(schema, a, c, ("d", "null", "null"))


def test_names_that_are_not_ascii_or_need_escapes_can_be_called(takes, follow):
    schema = {"type": "object", "properties": {'größe "x" & y': {"type": "integer"}}, "required": ['größe "x" & y']}
    assert takes(schema, ("größe &quot;x&quot; &amp; y", "number", "1"))
    text = START + call("größe.查:v1/x-y") + END_TOOLS
    assert follow(text, tools=[tool("größe.查:v1/x-y")], tool_choice="required") is None


def test_further_arguments_keep_to_their_schema_and_do_not_weaken_declared_ones(takes):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    assert takes(schema, ("n", "number", "1"), ("m", "string", "x"), ("nn", "string", "y"))
    assert not takes(schema, ("n", "string", "x")), "a declared argument is none of the further ones"
    assert not takes(schema, ("m", "number", "1"))


def test_a_schema_that_arguments_one_by_one_cannot_keep_is_kept_as_one_piece_of_json(follow):
    schema = {"type": "object", "anyOf": [of({"type": "null"}), of({"type": "boolean"})]}
    opened = START + '<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>'
    tools = [tool("f", schema)]
    good = opened + '{"k": true}<|close|>json<|sep|>' + END_TOOLS
    assert follow(good, tools=tools, tool_choice="required") is None
    assert follow(opened + '{"k": 1', tools=tools, tool_choice="required") is not None


def test_a_tool_without_parameters_takes_none_and_one_that_is_not_strict_anything(takes):
    assert takes(None)
    assert not takes(None, ("a", "null", "null"))
    assert takes(of({"type": "null"}), ("other", "number", "1"), ("k", "string", "x"), strict=False)


@pytest.mark.parametrize(
    ("schema", "field", "says"),
    [
        ({"type": "string"}, ".type", "arguments of a call are an object"),
        (of({"type": "strin"}), "", "Invalid type"),
        (of({"contains": {}}), "", "Unimplemented keys"),
        (of({"uniqueItems": True}), "", "Unimplemented keys"),
        (of({"type": "string", "pattern": "("}), "", "regex"),
        (of({"type": "string", "minLength": "2"}), "", "minLength"),
        (of({"type": "string", "maxLength": 10**9}), ".properties.k.maxLength", "at most 65536"),
        (of({"enum": list(range(9000))}), ".properties.k.enum", "at most 8192"),
        (of({"type": "integer", "minimum": 3, "maximum": 1}), "", "nsatisfiable"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}, ".properties", "at most 1024"),
        ({"type": "object", "properties": []}, "", "properties"),
        ({"type": "object", "required": "k"}, "", "required"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_with_its_field_and_the_reason(follow, schema, field, says):
    tools = [tool("ok", of({"type": "null"})), tool("f", schema)]
    error = refused(lambda: follow("", tools=tools, tool_choice="required"))
    assert error.param == f"tools[1].function.parameters{field}"
    assert says in str(error), str(error)


def test_the_advice_to_drop_strict_works(follow):
    tools = [tool("f", of({"contains": {}}), strict=False)]
    assert follow(START + call("f", ("k", "null", "null")) + END_TOOLS, tools=tools, tool_choice="required") is None


def test_references_and_words_are_read_as_the_whole_schema_says(takes):
    pair = {"type": "array", "items": [{"type": "integer"}, {"type": "null"}], "additionalItems": False}
    older = {**of(pair), "$schema": "http://json-schema.org/draft-07/schema#"}
    assert takes(older, ("k", "array", "[1, null]"))
    assert not takes(older, ("k", "array", "[null]"))
    named = {**of({"type": "array", "items": {"$ref": "item"}}), "$id": "http://a.b/tool"}
    named["$defs"] = {"i": {"$id": "item", "type": "null"}}
    assert takes(named, ("k", "array", "[null]"))
    assert not takes(named, ("k", "array", "[1]"))


def test_nesting_has_a_limit(follow):
    schema = {"type": "null"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    error = refused(lambda: follow("", tools=[tool("f", of(schema))], tool_choice="required"))
    assert "deeper than 64 levels" in str(error)


def test_many_tools_fit_and_the_size_of_all_is_limited(follow):
    tools = [tool(f"f{i}", of({"type": "string"})) for i in range(300)]
    assert follow(START + call("f299", ("k", "string", "x")) + END_TOOLS, tools=tools, tool_choice="required") is None
    large = [tool(f"f{i}", of({"enum": [f"{i} {j}" + "x" * 100 for j in range(100)]})) for i in range(200)]
    error = refused(lambda: follow("", tools=large, tool_choice="required"))
    assert "at most 1048576" in str(error)


def test_alternatives_of_alternatives_are_not_spelled_out_but_kept_as_one_piece_of_json(follow):
    """Eight levels of sixteen alternatives each would be four thousand million values."""
    level = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"} for _ in range(16)]} for n in range(8)}
    schema = of({"$ref": "#/$defs/l0"}, **{"$defs": {**level, "l8": {"type": "integer"}}})
    for text, is_taken in (("1", True), ("true", False)):
        answer = START + call("f") + f'<|open|>json type="object"<|sep|>{{"k": {text}}}<|close|>json<|sep|>' + END_TOOLS
        assert (follow(answer, tools=[tool("f", schema)], tool_choice="required") is None) is is_taken


def test_alternatives_that_lead_to_no_type_at_all_are_refused(follow):
    level = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"} for _ in range(16)]} for n in range(8)}
    schema = of({"$ref": "#/$defs/l0"}, **{"$defs": {**level, "l8": {"type": []}}})
    error = refused(lambda: follow("", tools=[tool("f", schema)], tool_choice="required"))
    assert error.param == "tools[0].function.parameters"


def test_definitions_that_every_argument_would_repeat_are_refused_before_they_are_written_again(tokenizer):
    schema = {
        "type": "object",
        "properties": {f"p{n}": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": n} for n in range(900)},
        "$defs": {"d": {"type": "string"}, **{f"x{n}": {"enum": ["y" * 100]} for n in range(1000)}},
    }
    prompt = encode_chat([USER], tokenizer, tools=[tool("f", schema)], tool_choice="required")
    error = refused(lambda: chat_grammar(prompt, tokenizer, None))
    assert error.param == "tools[0].function.parameters"
    assert "4194304 characters" in str(error)


def test_arguments_that_refer_to_nothing_repeat_no_definitions(takes):
    schema = of({"type": "integer"}, **{"$defs": {f"x{n}": {"enum": ["y" * 100]} for n in range(1000)}})
    schema["properties"] |= {f"p{n}": {"type": "integer", "minimum": n} for n in range(200)}
    assert takes(schema, ("k", "number", "1"))
