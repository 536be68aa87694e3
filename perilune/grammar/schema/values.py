"""A JSON schema of one argument as alternatives by JSON type: strings stand raw in a call, all others as JSON."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from perilune.errors import RequestError
from perilune.grammar.markup import ANY_TEXT
from perilune.grammar.schema.rule import MAX_ALTERNATIVES, Schema, json_rule
from perilune.grammar.spec import literal

JSON_TYPES = ("string", "number", "boolean", "null", "object", "array")

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_STRING_KEYS = ("minLength", "maxLength", "pattern", "format")
_COMBINING = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"}
_MAX_REFERENCES = 16
_REFERENCES = ("$ref", "$dynamicRef")
MAX_WRITTEN_CHARS = 4 * 1024 * 1024
DRAFT = "https://json-schema.org/draft/2020-12/schema"

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}

_OPAQUE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")
_ASSERTION = re.compile(r"\\[bB]")


@dataclass(frozen=True)
class Value:
    """One alternative: the type that the model declares, and the right side of a Lark rule for what follows.

    With `is_terminal` that is an expression of terminals, which only a rule named in capitals may hold.
    """

    type: str
    rule: str
    is_terminal: bool = False


class CannotSpell(Exception):
    """The schema says something that alternatives by type cannot; it must be kept as a whole."""


class Scope:
    """The definitions that the schemas of one tool refer to, and a bound on what is written of them.

    Every value is a grammar of its own and repeats what it refers to, so that a small request could ask for gigabytes.
    """

    def __init__(self, definitions: Schema, written: Counter[str], field: str):
        self.definitions = definitions
        self._written = written
        self._field = field

    def json_rule(self, schema: Schema) -> str:
        """The rule for JSON of a schema, with the definitions where it may need them."""
        has_references = any(f'"{name}"' in json.dumps(schema) for name in _REFERENCES)
        # which draft it is decides what some words mean, so that is always told
        needed = self.definitions if has_references else {"$schema": self.definitions.get("$schema", DRAFT)}
        rule = json_rule({**schema, **needed})
        self._written["characters"] += len(rule)
        if self._written["characters"] > MAX_WRITTEN_CHARS:
            raise RequestError(
                f"{self._field} and the tools before it make a grammar of more than {MAX_WRITTEN_CHARS} characters, "
                "which is the limit: refer to fewer definitions",
                param=self._field,
            )
        return rule


def any_value() -> list[Value]:
    """A value of every type."""
    return [Value("string", ANY_TEXT), *(Value(name, json_rule({"type": name})) for name in JSON_TYPES[1:])]


def values_of(schema: object, scope: Scope, depth: int = 0) -> list[Value]:
    """The alternatives for values of `schema`, whose local references lead into the definitions of `scope`."""
    if schema is True:
        return any_value()
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        raise CannotSpell
    says = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    if not says:
        return any_value()
    if set(says) == {"$ref"}:
        return values_of(_resolve(says["$ref"], scope.definitions), scope, depth + 1)
    if set(says) == {"anyOf"} and isinstance(says["anyOf"], list) and says["anyOf"]:
        return _alternatives(says["anyOf"], scope, depth + 1)
    if (_COMBINING | {"$id"}) & says.keys():
        raise CannotSpell
    if "const" in says or "enum" in says:
        return _listed(says)
    return _typed(says, scope)


def _alternatives(options: Sequence[object], scope: Scope, depth: int) -> list[Value]:
    found: list[Value] = []
    for option in options:
        found += values_of(option, scope, depth)
        if len(found) > MAX_ALTERNATIVES:
            raise CannotSpell
    return found


def _resolve(reference: object, definitions: Schema) -> object:
    if isinstance(reference, str) and (match := re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference)):
        named = definitions.get(match[1])
        if isinstance(named, Mapping) and named.get(match[2]) is not None:
            return named[match[2]]
    raise CannotSpell


def _listed(says: Schema) -> list[Value]:
    """The values of `enum` or `const`, which may have a `type` beside them and nothing else."""
    listed = says.get("enum", [says.get("const")])
    if set(says) - {"enum", "const", "type"} or {"enum", "const"} <= says.keys() or not isinstance(listed, list):
        raise CannotSpell
    if "type" in says:
        kinds = says["type"] if isinstance(says["type"], list) else [says["type"]]
        listed = [value for value in listed if any(_is_of(value, kind) for kind in kinds)]
    by_type: dict[str, list[Any]] = {}
    for value in listed:
        by_type.setdefault(next(name for name in JSON_TYPES if _is_of(value, name)), []).append(value)
    if not by_type:
        raise CannotSpell
    strings = by_type.pop("string", [])
    # a terminal, since the parser itself follows no more than 2000 alternatives at once
    found = [Value("string", " | ".join(map(literal, strings)), is_terminal=True)] if strings else []
    return found + [Value(name, json_rule({"enum": values})) for name, values in by_type.items()]


def _is_of(value: object, kind: object) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds: dict[object, Any] = {"string": str, "number": (int, float), "null": type(None)}
    kinds |= {"object": Mapping, "array": list}
    return isinstance(value, kinds.get(kind, ()))


def _typed(says: Schema, scope: Scope) -> list[Value]:
    kinds = says.get("type")
    found: list[Value] = []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind == "string":
            found.append(_string(says))
        elif kind == "integer" or kind in JSON_TYPES:
            rest = {key: value for key, value in says.items() if key not in _STRING_KEYS}
            found.append(Value("number" if kind == "integer" else kind, scope.json_rule({**rest, "type": kind})))
        else:
            raise CannotSpell
    if not found:
        raise CannotSpell
    return found


def _string(says: Schema) -> Value:
    """A string stands raw in a call, so its keywords become regular expressions over the text itself."""
    terms = []
    low, high = says.get("minLength", 0), says.get("maxLength", "")
    if not isinstance(low, int) or not (high == "" or isinstance(high, int)):
        raise CannotSpell
    if low or high != "":
        terms.append(f"/(?s:.{{{low},{high}}})/")
    if "pattern" in says:
        terms.append(f"/{regex_to_lark(_whole_pattern(says['pattern']), use_ascii='dw')}/")
    if "format" in says:
        if says["format"] not in _FORMATS:
            raise CannotSpell
        terms.append(f"/{_FORMATS[says['format']]}/")
    if not terms:
        return Value("string", ANY_TEXT)
    return Value("string", " & ".join(terms), is_terminal=True)


def _whole_pattern(pattern: object) -> str:
    """A pattern, which is searched for, as one that must match the whole text."""
    if not isinstance(pattern, str) or _ASSERTION.search(pattern):
        raise CannotSpell
    # same length, with everything that is no operator blanked out
    bare = _OPAQUE.sub(lambda match: "x" * len(match[0]), pattern)
    begins, ends = bare.startswith("^"), bare.endswith("$")
    inner = bare[begins : len(bare) - ends]
    if any(sign in inner for sign in "^$") or re.search(r"\(\?(?!:)", inner):
        raise CannotSpell
    if (begins or ends) and _has_outer_choice(inner):
        raise CannotSpell
    core = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}({core}){'' if ends else '(?s:.*)'}"


def _has_outer_choice(bare: Sequence[str]) -> bool:
    depth = 0
    for sign in bare:
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            return True
    return False


def not_one_of(names: Sequence[str]) -> str:
    """A terminal for the key of an argument that is none of `names`; quotes and ampersands would have to be escaped."""
    plain = r'/[^"&\r\n]{1,64}/'
    if not names:
        return plain
    listed = "|".join("".join(map(_escaped, name)) for name in names)
    return f"{plain} & ~/({listed})/"


def _escaped(sign: str) -> str:
    return sign if sign.isalnum() or sign == "_" else f"\\x{{{ord(sign):x}}}"
