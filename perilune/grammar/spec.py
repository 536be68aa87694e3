"""What may be generated, as a message: grammar source, when it begins to hold, and which field of the request it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from perilune.errors import RequestError

MAX_SOURCE_BYTES = 1024 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_COUNT = 65_536
MAX_ENUM_VALUES = 8192

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# one blank at most wherever JSON allows any number, so that no answer consists of blanks
_JSON_OPTIONS = {"whitespace_pattern": "[ ]?"}


class Gate(Enum):
    """From where on a grammar holds.

    ANSWER: from the first token. THINKING: from the first control token that can end the reasoning, which stays free.
    TOOLS: from each tag that is opened, in an otherwise free answer; it constrains the tools channel.
    """

    ANSWER = "answer"
    THINKING = "thinking"
    TOOLS = "tools"


@dataclass(frozen=True)
class Part:
    """A piece of a grammar that a client wrote, standing alone so that an error can name its `field`."""

    field: str
    source: str


@dataclass(frozen=True)
class Grammar:
    """`source` and the sources of `parts` are what llguidance compiles.

    `prefix` are the ids at the end of the prompt that already belong to the answer: a beginning that the client wrote.
    """

    source: str
    gate: Gate
    parts: tuple[Part, ...] = ()
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.source.encode(errors="surrogatepass"))
        if size > MAX_SOURCE_BYTES:
            field = self.parts[0].field if self.parts else "grammar"
            raise RequestError(
                f"{field} and what else constrains the answer makes a grammar of {size} bytes; "
                f"at most {MAX_SOURCE_BYTES} are allowed",
                param=field,
            )


def check_schema(schema: object, field: str) -> None:
    """Refuse a JSON schema that is nested too deeply or counts too far; RequestError names the place and the limit.

    What the keywords mean is judged by the compiler.
    """
    pending: list[tuple[object, str, int]] = [(schema, field, 0)]
    while pending:
        value, place, depth = pending.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(f"{field} is nested deeper than {MAX_SCHEMA_DEPTH} levels, the limit", param=field)
        if isinstance(value, Mapping):
            for name in _COUNTS:
                _check_count(value.get(name), f"{place}.{name}")
            _check_enum(value.get("enum"), f"{place}.enum")
            pending += [(item, f"{place}.{key}", depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]


def _check_count(count: object, place: str) -> None:
    # under `properties` it may be the name of a property, which is no number
    if isinstance(count, int | float) and count > MAX_COUNT:
        raise RequestError(f"{place} is {count:g}; at most {MAX_COUNT} is allowed", param=place)


def _check_enum(values: object, place: str) -> None:
    if isinstance(values, list) and len(values) > MAX_ENUM_VALUES:
        raise RequestError(f"{place} has {len(values)} values; at most {MAX_ENUM_VALUES} are allowed", param=place)


def json_rule(schema: object) -> str:
    """The right side of a Lark rule for JSON of a schema, which must be checked."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _JSON_OPTIONS}
    elif schema is True:
        schema = {"x-guidance": _JSON_OPTIONS}
    try:
        return f"%json {json.dumps(schema, ensure_ascii=False, allow_nan=False)}"
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the schema cannot be written as JSON: {error}") from error


def literal(text: str) -> str:
    """Text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)
