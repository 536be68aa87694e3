"""The form that a request demands of the answer: free text, JSON, or JSON of a schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perilune.errors import RequestError
from perilune.text.prompt.fields import check_keys, json_fence, read_flag, read_name, read_object, shown, wrong_type
from perilune.text.prompt.segments import Segment, system_message

_TYPES = ("text", "json_object", "json_schema")
_FIELD = "response_format"
_SCHEMA_FIELD = "response_format.json_schema"
_BODY = (
    "The system is invoked with `response_format={type}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


@dataclass(frozen=True)
class OutputFormat:
    """A checked `response_format`; `schema` belongs to json_schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: Mapping[str, object] | None = None


def parse_output_format(given: object) -> OutputFormat:
    """Read `response_format`; RequestError names the field that is wrong."""
    if given is None:
        return OutputFormat()
    form = read_object(given, _FIELD)
    kind = form.get("type")
    if kind == "text" or kind == "json_object":
        check_keys(form, ("type",), f"the response format {kind}", _FIELD)
        return OutputFormat("text" if kind == "text" else "json_object")
    if kind != "json_schema":
        param = f"{_FIELD}.type"
        raise RequestError(f"{param} is {shown(kind)}; allowed are {', '.join(_TYPES)}", param=param)
    check_keys(form, ("type", "json_schema"), "the response format json_schema", _FIELD)
    named = read_object(form.get("json_schema"), _SCHEMA_FIELD)
    check_keys(named, ("name", "description", "schema", "strict"), "a named schema", _SCHEMA_FIELD)
    read_name(named.get("name"), f"{_SCHEMA_FIELD}.name")
    read_flag(named.get("strict"), f"{_SCHEMA_FIELD}.strict")
    schema = named.get("schema")
    if not isinstance(schema, Mapping):
        raise wrong_type(schema, "an object (a JSON schema)", f"{_SCHEMA_FIELD}.schema")
    return OutputFormat("json_schema", schema)


def output_format_message(form: OutputFormat) -> list[Segment]:
    """The message that tells the model the form; nothing for free text."""
    if form.type == "text":
        return []
    body = _BODY.format(type=form.type)
    if form.type == "json_schema":
        body += _SCHEMA + json_fence(form.schema, f"{_SCHEMA_FIELD}.schema")
    return system_message("response-format", body)
