"""Schemas that are rewritten for the compiler: what they allow is still what they allowed before."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from perilune.grammar.answer import json_body, text_grammar
from perilune.grammar.schema.plain import plain
from tests.grammar.conftest import is_allowed

OBJECT = {"type": "object", "additionalProperties": {"type": "integer"}}
AB = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "additionalProperties": False}
# every schema is asked about all of these
VALUES: list[Any] = [None, True, 0, 3, 1.5, "", "a", "-", "菺", "/a/b", "/~2", "#", "a@b.cd", "http://a.b/c"]
VALUES += [[], ["a"], ["a", "a"], [1], [1, 2, 3], {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 9}]
VALUES += [{"aa": 2}, {"a": "x"}, {"y.": 1}, {"yb": 1}, {"kind": None}]

CASES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": False}, [["a", "a"]]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, [["a"], []]),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2.0}, [[1]]),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}, "minContains": 0}, [[], [1, 2, 3]]),
    ({"type": "array", "items": {"type": "integer"}, "maxContains": 1}, [[1, 2, 3]]),
    ({"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": False}, [["a"]]),
    ({"type": "integer", "if": {"const": 3}}, [0, 3]),
    ({"type": "integer", "then": False}, [0, 3]),
    ({**OBJECT, "propertyNames": {"type": "string"}}, [{"a": 1}, {}]),
    ({**OBJECT, "propertyNames": {"pattern": "^a+$"}}, [{"a": 1}, {"aa": 2}, {}]),
    ({**OBJECT, "propertyNames": {"enum": ["a", "y."]}}, [{"a": 1}, {"y.": 1}]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}, [{"a": 1}, {}]),
    ({"type": "object", **AB, "unevaluatedProperties": False}, [{"a": 1, "b": 9}]),
    ({"type": "object", **AB, "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}, {"b": 1}, {}]),
    ({"type": "object", **AB, "dependentSchemas": {"a": {"properties": {"b": {"maximum": 5}}}}}, [{"a": 1, "b": 2}]),
    ({"type": "object", **AB, "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 2}, {"b": 1}]),
    ({"not": {"type": "string"}}, [None, True, 0, [], {}]),
    ({"not": {"type": ["object", "array", "number"]}}, [None, True, "a"]),
    ({"type": ["string", "null"], "not": {"type": "null"}}, ["a"]),
    ({"not": False}, [None, "a", 3]),
    ({"type": "object", "properties": {"kind": {"not": {}}}, "additionalProperties": True}, [{"a": 1}, {}]),
    ({**OBJECT, "not": {"required": ["a"]}}, [{"b": 1}, {}]),
    ({"type": "string", "format": "password"}, ["a"]),
    ({"type": "string", "format": "json-pointer"}, ["", "/a/b"]),
    ({"type": "string", "format": "relative-json-pointer"}, []),
    ({"type": "string", "format": "iri"}, ["http://a.b/c"]),
    ({"type": "string", "format": "idn-email"}, ["a@b.cd"]),
    ({"type": "string", "pattern": r"^\W$"}, ["-"]),
    ({"type": "number", "maximum": 1e19}, [0, 3, 1.5]),
    ({"maximum": 1e19}, [0, "a", None]),
    ({"$id": "http://a.b/c", "properties": {"a": {"$id": "http://x.y/z", "type": "object"}}}, [{"b": 1}]),
]


WORDS = sorted({word for schema, _ in CASES for word in schema})
ANYTHING = st.recursive(
    st.sampled_from([None, True, False, 0, 1.0, "a", "string", "integer", "iri"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@given(ANYTHING)
def test_what_is_no_schema_does_no_harm(value):
    before = json.dumps(value)
    plain(value)
    assert json.dumps(value) == before


@pytest.fixture
def takes(tokenizer, compiler):
    def run(schema, value):
        state = compiler.compile(text_grammar(json_body(schema, "schema")))
        for token_id in [*tokenizer.encode(json.dumps(value, ensure_ascii=False)), tokenizer.end_of_msg_id]:
            if not is_allowed(state, token_id, compiler):
                return False
            state.advance(token_id)
        return state.error is None

    return run


@pytest.mark.parametrize(("schema", "wanted"), CASES, ids=lambda item: json.dumps(item)[:70])
def test_what_is_taken_is_valid_and_what_should_be_is_taken(takes, schema, wanted):
    taken = [value for value in VALUES if takes(schema, value)]
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    assert [value for value in taken if not validator.is_valid(value)] == []
    assert [value for value in wanted if value not in taken] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"const": 1}},
        {"not": {"type": "integer"}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"const": 1}},
        {"if": {"const": 1}, "then": {"type": "string"}},
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"propertyNames": {"maxLength": 3}},
        {"properties": {"a": {}}, "propertyNames": {"pattern": "b"}},
    ],
    ids=json.dumps,
)
def test_what_cannot_be_put_otherwise_stays(schema):
    assert plain(schema) == schema
