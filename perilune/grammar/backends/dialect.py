"""Grammars as xgrammar reads them: its Lark lacks some of llguidance's, and it passes over words of a schema.

What it would pass over is refused here, so that no answer breaks a rule that the request was told it keeps.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perilune.grammar.markup import ANY_TEXT

# strings and expressions stay as they are, whatever they spell
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|%json ')
_DECODER = json.JSONDecoder()
_ABSOLUTE = "json-schema:///#/"

_SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_SAYS_NOTHING |= {"$schema", "$defs", "definitions"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_WORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set[str](),
    "null": set[str](),
}
_KINDS: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "array": (list,)}
_KINDS |= {"object": (dict,), "boolean": (bool,), "null": (type(None),)}
# each speaks for the whole schema; what stands beside it would be passed over
_WHOLE = ("$ref", "anyOf", "enum", "const")


class NotHeld(Exception):
    """xgrammar would not hold answers to this; the message says to what."""


@dataclass
class Dialect:
    """Lark for xgrammar, and the grammars and JSON schemas that it refers to by name."""

    lark: str
    grammars: dict[str, str]
    schemas: dict[str, Any]


def in_dialect(source: str) -> Dialect:
    """What a grammar's source is for xgrammar; NotHeld says why it cannot be."""
    schemas: dict[str, Any] = {}
    if not source.startswith("{"):
        return Dialect(_lark(source, schemas), {}, schemas)
    first, *named = json.loads(source)["grammars"]
    grammars = {grammar["name"]: _lark(grammar["lark_grammar"], schemas) for grammar in named}
    return Dialect(_lark(first["lark_grammar"], schemas), grammars, schemas)


def _lark(text: str, schemas: dict[str, Any]) -> str:
    """The text with a name for each schema, which is added to `schemas`."""
    pieces, place = [], 0
    while (match := _TOKEN.search(text, place)) is not None:
        pieces.append(text[place : match.start()])
        place = match.end()
        if match[0] == ANY_TEXT:
            pieces.append(r"/[\s\S]*/")
        elif match[0] == "%json ":
            schema, place = _decoded(text, place)
            name = f"json_{len(schemas)}"
            schemas[name] = _held(schema)
            pieces.append(f"@{name}")
        else:
            pieces.append(match[0])
    return "".join([*pieces, text[place:]])


def _decoded(text: str, place: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except ValueError as error:
        raise NotHeld(f"%json without JSON: {error}") from error


def _held(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    written = {key: value for key, value in schema.items() if key != "x-guidance"}
    said = written.keys() - _SAYS_NOTHING
    for word in _WHOLE:
        if word in said:
            _check_alone(word, written, said - {word})
            break
    else:
        _check_kinds(written, said)
    if "$ref" in said:
        written["$ref"] = _reference(written["$ref"])
    for key in ("items", "additionalProperties"):
        if key in written:
            written[key] = _held(written[key])
    for key in ("anyOf", "prefixItems"):
        if key in written:
            written[key] = [_held(item) for item in written[key]]
    for key in ("properties", "$defs", "definitions"):
        if key in written:
            written[key] = {name: _held(item) for name, item in written[key].items()}
    return written


def _check_alone(word: str, schema: Mapping[str, Any], beside: set[str]) -> None:
    if word in ("enum", "const") and beside == {"type"}:
        values = schema["enum"] if word == "enum" else [schema["const"]]
        if all(_is_of(value, _kinds(schema)) for value in values):
            return
    if beside:
        raise NotHeld(f"{', '.join(sorted(beside))} beside {word}")


def _check_kinds(schema: Mapping[str, Any], said: set[str]) -> None:
    kinds = _kinds(schema)
    unknown = said - {"type"} - set[str]().union(*(_WORDS[kind] for kind in kinds if kind in _WORDS))
    if unknown:
        raise NotHeld(f"{', '.join(sorted(unknown))}" + (" without type" if not kinds else ""))
    if "pattern" in said and said & {"minLength", "maxLength", "format"}:
        raise NotHeld("pattern beside minLength, maxLength or format")
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}):
            raise NotHeld(f"required with {name!r}, which properties does not declare")


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _is_of(value: object, kinds: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _KINDS.get(kind, ())) for kind in kinds)


def _reference(address: str) -> str:
    local = "#/" + address.removeprefix(_ABSOLUTE) if address.startswith(_ABSOLUTE) else address
    if not re.fullmatch(r"#(/(\$defs|definitions)/[^/~%]+)?", local):
        raise NotHeld(f"a $ref to {address}")
    return local
