"""JSON schemas as the compiler takes them: within limits, and with numbers that every reader of JSON can hold."""

import json
from collections.abc import Mapping
from typing import Any

from perilune.errors import RequestError
from perilune.grammar.spec import MAX_SOURCE_BYTES

Schema = Mapping[str, Any]

MAX_DEPTH = 64
MAX_COUNT = 65_536
MAX_ENUM_VALUES = 8192
MAX_ALTERNATIVES = 256
MAX_PROPERTIES = 1024
# A number without limits could have an exponent that no float holds, or more digits than readers take.
LARGEST_NUMBER = 10**18

_RANGE = {"minimum": -LARGEST_NUMBER, "maximum": LARGEST_NUMBER}

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LIMITS = {*LOWER, *UPPER}
_COMBINING = ("anyOf", "oneOf", "allOf")
OF_SCHEMAS = (*_COMBINING, "prefixItems")
OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
SUBSCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_ANY = "perilune_any"
# numbers without limits; referred to, since the compiler takes half a millisecond for each range
_FREE_NUMBERS = {"integer": "perilune_integer", "number": "perilune_number"}
# what addresses are relative to where a schema has none
_BASE = "json-schema:///"
# one blank at most wherever JSON allows any number, so that no answer consists of blanks
_OPTIONS = {"whitespace_pattern": "[ ]?"}


def check_schema(schema: object, field: str) -> None:
    """Refuse a schema that is nested too deeply or counts too far; RequestError names the place and the limit.

    What the keywords mean is judged by the compiler.
    """
    try:
        size = len(json.dumps(schema))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} cannot be written as JSON: {error}", param=field) from error
    if size > MAX_SOURCE_BYTES:
        raise RequestError(f"{field} has {size} characters; at most {MAX_SOURCE_BYTES} are allowed", param=field)
    pending: list[tuple[object, str, int]] = [(schema, field, 0)]
    while pending:
        value, place, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise RequestError(f"{field} is nested deeper than {MAX_DEPTH} levels, which is the limit", param=field)
        if isinstance(value, Mapping):
            for name in _COUNTS:
                _check_count(value.get(name), f"{place}.{name}")
            _check_size(value.get("enum"), f"{place}.enum", MAX_ENUM_VALUES)
            for name in _COMBINING:
                _check_size(value.get(name), f"{place}.{name}", MAX_ALTERNATIVES)
            _check_size(value.get("properties"), f"{place}.properties", MAX_PROPERTIES)
            pending += [(item, f"{place}.{key}", depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]


def _check_count(count: object, place: str) -> None:
    # under `properties` it may be the name of a property, which is no number
    if isinstance(count, int | float) and count > MAX_COUNT:
        raise RequestError(f"{place} is {count:g}; at most {MAX_COUNT} is allowed", param=place)


def _check_size(values: object, place: str, limit: int) -> None:
    if isinstance(values, list | Mapping) and len(values) > limit:
        raise RequestError(f"{place} has {len(values)} entries; at most {limit} are allowed", param=place)


def json_rule(schema: object) -> str:
    """The right side of a Lark rule for JSON of a checked schema; RequestError for what JSON cannot write."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema cannot be written as JSON: {error}") from error
    # where schemas are intersected the compiler follows no recursion, so there what is free stays free
    anything = None if any(f'"{name}"' in text for name in _COMBINING) else {"$ref": _address(schema, _ANY)}
    written = _bounded(schema, anything)
    if isinstance(written, dict):
        definitions = written.get("$defs", {})
        if isinstance(definitions, Mapping):
            ranges = {name: {"type": kind, **_RANGE} for kind, name in _FREE_NUMBERS.items()}
            written["$defs"] = {**definitions, _ANY: _any_schema({"$ref": _address(schema, _ANY)}), **ranges}
        written["x-guidance"] = _OPTIONS
    return f"%json {json.dumps(written, ensure_ascii=False)}"


def _address(schema: object, name: str) -> str:
    """Where the definition `name` lies, from wherever inside `schema`, whose parts may have their own."""
    root = schema.get("$id", "") if isinstance(schema, Mapping) else ""
    root = root.rstrip("#") if isinstance(root, str) else ""
    return f"{root if ':' in root else _BASE + root.lstrip('/')}#/$defs/{name}"


def _any_schema(anything: Schema) -> dict[str, Any]:
    return {
        "anyOf": [
            {"type": ["null", "boolean", "string"]},
            {"type": "number", **_RANGE},
            {"type": "array", "items": anything},
            {"type": "object", "additionalProperties": anything},
        ],
    }


def _bounded(schema: object, anything: Schema | None) -> object:
    """The schema with limits on every number that has none; what is no schema is left as it is.

    With `anything`, that is what values obey of which the schema says nothing.
    """
    if schema is True and anything:
        return anything
    if not isinstance(schema, Mapping):
        return schema
    written = _inner(schema, anything)
    kind = written.get("type")
    if anything and kind in ("integer", "number") and not written.keys() - _SAYS_NOTHING - {"type"}:
        del written["type"]
        return {**written, "$ref": anything["$ref"].removesuffix(_ANY) + _FREE_NUMBERS[kind]}
    if anything and not schema.keys() - _SAYS_NOTHING - {"$schema", "$defs", "definitions", "$id"}:
        return {**written, **anything}
    kinds = written.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if {"number", "integer"} & {kind for kind in kinds if isinstance(kind, str)} or LIMITS & written.keys():
        _limit(written)
    if anything and "object" in kinds and not {"additionalProperties", "patternProperties"} & written.keys():
        written["additionalProperties"] = anything
    if anything and "array" in kinds and "items" not in written:
        written["items"] = anything
    return written


def _inner(schema: Schema, anything: Schema | None) -> dict[str, Any]:
    written = dict(schema)
    for key in SUBSCHEMAS:
        if key in written:
            written[key] = _bounded(written[key], anything)
    for key in OF_SCHEMAS:
        if isinstance(written.get(key), list):
            written[key] = [_bounded(item, anything) for item in written[key]]
    for key in OF_NAMED_SCHEMAS:
        if isinstance(written.get(key), Mapping):
            written[key] = {name: _bounded(item, anything) for name, item in written[key].items()}
    return written


def _limit(schema: dict[str, Any]) -> None:
    """Give a number both limits, within what readers take unless all that it allows lies beyond."""
    low = [schema[name] for name in LOWER if _is_number(schema.get(name))]
    high = [schema[name] for name in UPPER if _is_number(schema.get(name))]
    for name in UPPER if max(low, default=0) <= LARGEST_NUMBER else ():
        if _is_number(schema.get(name)):
            schema[name] = min(schema[name], LARGEST_NUMBER)
    for name in LOWER if min(high, default=0) >= -LARGEST_NUMBER else ():
        if _is_number(schema.get(name)):
            schema[name] = max(schema[name], -LARGEST_NUMBER)
    if not low:
        schema["minimum"] = min([-LARGEST_NUMBER, *high])
    if not high:
        schema["maximum"] = max([LARGEST_NUMBER, *low])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
