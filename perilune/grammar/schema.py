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

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_COMBINING = ("anyOf", "oneOf", "allOf")
_OF_SCHEMAS = (*_COMBINING, "prefixItems")
_OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_SUBSCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_ANY = "perilune_any"
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
    written = _bounded(schema, fills=not any(f'"{name}"' in text for name in _COMBINING))
    if isinstance(written, dict):
        definitions = written.get("$defs", {})
        if isinstance(definitions, Mapping):
            written["$defs"] = {**definitions, _ANY: _any_schema()}
        written["x-guidance"] = _OPTIONS
    return f"%json {json.dumps(written, ensure_ascii=False)}"


def _any_schema() -> dict[str, Any]:
    anything = {"$ref": f"#/$defs/{_ANY}"}
    return {
        "anyOf": [
            {"type": ["null", "boolean", "string"]},
            {"type": "number", "minimum": -LARGEST_NUMBER, "maximum": LARGEST_NUMBER},
            {"type": "array", "items": anything},
            {"type": "object", "additionalProperties": anything},
        ]
    }


def _bounded(schema: object, *, fills: bool) -> object:
    """The schema with limits on every number that has none; what is no schema is left as it is.

    With `fills` that holds for values of which the schema says nothing, too.
    """
    if schema is True and fills:
        return {"$ref": f"#/$defs/{_ANY}"}
    if not isinstance(schema, Mapping):
        return schema
    written = _inner(schema, fills=fills)
    if fills and not schema.keys() - _SAYS_NOTHING - {"$schema", "$defs", "definitions", "$id"}:
        return {**written, "$ref": f"#/$defs/{_ANY}"}
    kinds = written.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if {"number", "integer"} & {kind for kind in kinds if isinstance(kind, str)}:
        if not {"minimum", "exclusiveMinimum"} & written.keys():
            written["minimum"] = min(-LARGEST_NUMBER, _number(written, "maximum", "exclusiveMaximum"))
        if not {"maximum", "exclusiveMaximum"} & written.keys():
            written["maximum"] = max(LARGEST_NUMBER, _number(written, "minimum", "exclusiveMinimum"))
    if fills and "object" in kinds and not {"additionalProperties", "patternProperties"} & written.keys():
        written["additionalProperties"] = {"$ref": f"#/$defs/{_ANY}"}
    if fills and "array" in kinds and "items" not in written:
        written["items"] = {"$ref": f"#/$defs/{_ANY}"}
    return written


def _inner(schema: Schema, *, fills: bool) -> dict[str, Any]:
    written = dict(schema)
    for key in _SUBSCHEMAS:
        if key in written:
            written[key] = _bounded(written[key], fills=fills)
    for key in _OF_SCHEMAS:
        if isinstance(written.get(key), list):
            written[key] = [_bounded(item, fills=fills) for item in written[key]]
    for key in _OF_NAMED_SCHEMAS:
        if isinstance(written.get(key), Mapping):
            written[key] = {name: _bounded(item, fills=fills) for name, item in written[key].items()}
    return written


def _number(schema: Schema, *names: str) -> float:
    found = [value for name in names if isinstance(value := schema.get(name), int | float)]
    return found[0] if found else 0
