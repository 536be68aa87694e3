"""Schemas in the words that the compiler knows.

What is written allows the same values, or fewer of them: every answer that it allows satisfies the schema as given.
Words that cannot be put this way are left, for the compiler to refuse.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perilune.grammar.schema.rule import OF_NAMED_SCHEMAS, OF_SCHEMAS, SUBSCHEMAS, Schema

JSON_TYPES = ("string", "number", "boolean", "null", "object", "array")

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# what applies other schemas to the same value, each of which may speak of its properties and items
_APPLY = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas"}
_APPLY |= {"contains", "dependencies"}

_POINTER = "(/([^~/]|~[01])*)*"
# draft 2020-12 leaves it open whether `format` is held to; names that it does not define say nothing in any case
_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
_NARROWER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "iri-reference": "uri"}
_NARROWER |= {"uri-reference": "uri", "uri-template": "uri"}
_FORMAT_PATTERNS = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]{{0,3}})(#|{_POINTER})$",
}

# \W, \D and \S differ between dialects of regular expressions; these are in all of them
_NEGATED = {r"\W": r"[^\p{L}\p{N}_]", r"\D": r"[^\p{N}]", r"\S": r"[^\s\x{1c}-\x{1f}\x{85}\x{feff}]"}
_PATTERN_ITEM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def plain(schema: object) -> object:
    """`schema`, and all schemas inside, in words of the compiler; what is no schema is given back as it is."""
    return plain_schema(schema) if isinstance(schema, Mapping) else schema


def plain_schema(schema: Schema) -> dict[str, Any]:
    """The same for what is known to be an object."""
    written = _inner(schema)
    for rewrite in _REWRITES:
        rewrite(written)
    return written


def _inner(schema: Schema) -> dict[str, Any]:
    written = dict(schema)
    for key in (*SUBSCHEMAS, "unevaluatedProperties", "unevaluatedItems"):
        if key in written:
            written[key] = plain(written[key])
    for key in OF_SCHEMAS:
        if isinstance(written.get(key), list):
            written[key] = [plain(item) for item in written[key]]
    for key in (*OF_NAMED_SCHEMAS, "dependentSchemas", "dependencies"):
        if isinstance(written.get(key), Mapping):
            written[key] = {name: plain(item) for name, item in written[key].items()}
    return written


def _counts(schema: dict[str, Any]) -> None:
    """2.0 is the integer 2 in JSON Schema."""
    for key in _COUNTS:
        if isinstance(schema.get(key), float) and schema[key].is_integer():
            schema[key] = int(schema[key])


def _empty_words(schema: dict[str, Any]) -> None:
    """Words that say nothing by themselves or beside each other."""
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
    if "if" not in schema or not {"then", "else"} & schema.keys():
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if schema.get(key) == {}:
            del schema[key]
    for key in ("unevaluatedProperties", "unevaluatedItems"):
        if schema.get(key) is True or schema.get(key) == {}:
            del schema[key]


def _unevaluated(schema: dict[str, Any]) -> None:
    """Where nothing else applies to the same value, what is not evaluated is what is additional."""
    if _APPLY & schema.keys():
        return
    for key, further in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key in schema:
            schema.setdefault(further, schema.pop(key))
            schema.pop(key, None)


def _property_names(schema: dict[str, Any]) -> None:
    """Names that match become the properties that may be; declared ones must then all be told to match or not."""
    names = schema.get("propertyNames")
    if names is True or (isinstance(names, Mapping) and names in ({}, {"type": "string"})):
        del schema["propertyNames"]
        return
    if not isinstance(names, Mapping) or {"properties", "patternProperties", "required"} & schema.keys():
        return
    said = {key: value for key, value in names.items() if key != "type"}
    if names.get("type", "string") != "string" or len(said) != 1:
        return
    ((key, value),) = said.items()
    if key == "pattern" and isinstance(value, str):
        pattern = value
    elif key == "enum" and isinstance(value, list) and all(isinstance(name, str) for name in value):
        pattern = f"^({'|'.join(map(re.escape, value))})$"
    else:
        return
    del schema["propertyNames"]
    schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False


def _negation(schema: dict[str, Any]) -> None:
    """`not` where the opposite can be said: of nothing, of everything, of types, and of one required property."""
    if "not" not in schema:
        return
    denied = schema["not"]
    if denied is False:
        del schema["not"]
    elif denied is True or denied == {}:
        schema.clear()
        schema["enum"] = []
    elif isinstance(denied, Mapping) and denied.keys() == {"type"}:
        _deny_types(schema, _listed(denied["type"]), _listed(schema.get("type", list(JSON_TYPES))))
    elif isinstance(denied, Mapping) and denied.keys() == {"required"}:
        properties = schema.get("properties", {})
        if isinstance(properties, Mapping) and len(names := _listed(denied["required"])) == 1:
            schema["properties"] = {**properties, names[0]: False}
            del schema["not"]


def _deny_types(schema: dict[str, Any], denied: Sequence[str], own: Sequence[str]) -> None:
    """Without integers the numbers would be those with a fraction, which no type says."""
    if not denied or ("integer" in denied and "number" not in denied and {"number", "integer"} & {*own}):
        return
    numbers = ("number", "integer") if "number" in denied else ()
    schema["type"] = [kind for kind in own if kind not in (*denied, *numbers)]
    del schema["not"]


def _listed(value: object) -> list[str]:
    """One word or a list of words as a list; nothing for what is neither."""
    given = value if isinstance(value, list) else [value]
    words = [word for word in given if isinstance(word, str)]
    return words if len(words) == len(given) else []


def _dependencies(schema: dict[str, Any]) -> None:
    """A dependency: either the property is not there, or what depends on it holds."""
    demands: list[tuple[str, list[Any]]] = []
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(schema.get(key), Mapping):
            for name, demand in schema.pop(key).items():
                if isinstance(demand, list):
                    demands.append((name, [{"required": [name, *demand]}]))
                else:
                    demands.append((name, [{"required": [name]}, demand]))
    if demands:
        either = [{"anyOf": [{"properties": {name: False}}, {"allOf": held}]} for name, held in demands]
        schema["allOf"] = [*schema.get("allOf", []), *either]


def _format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if not isinstance(name, str) or name in _FORMATS:
        return
    if name in _NARROWER:
        schema["format"] = _NARROWER[name]
        return
    pattern = _FORMAT_PATTERNS.get(name)
    if pattern is None:
        del schema["format"]
    elif "pattern" not in schema:
        del schema["format"]
        schema["pattern"] = pattern


def _patterns(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _PATTERN_ITEM.sub(lambda match: _NEGATED.get(match[0], match[0]), schema["pattern"])


_REWRITES: tuple[Callable[[dict[str, Any]], None], ...] = (
    *(_counts, _empty_words, _unevaluated, _property_names, _negation, _dependencies, _format, _patterns),
)
