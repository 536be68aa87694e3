"""The calls of an earlier answer: read from a message and written into the tools channel."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from perilune.errors import RequestError
from perilune.text.prompt.fields import (
    check_keys,
    not_json,
    read_list,
    read_name,
    read_object,
    shown,
    wrong_type,
)
from perilune.text.prompt.segments import Segment, close_tag, element, open_tag
from perilune.text.tokenizer import check_encodable

MAX_CALLS = 16_384
MAX_ARGUMENTS = 65_536


@dataclass(frozen=True)
class Argument:
    """One argument of a call: its JSON type and its value as the model writes it."""

    key: str
    type: str
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made; `raw` holds arguments that are no JSON, and then `arguments` is empty."""

    call_id: str
    name: str
    arguments: tuple[Argument, ...] = ()
    raw: str | None = None


class CallCount:
    """The calls and arguments in the history of one request, of which every one costs time to read."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._num_arguments = 0

    def add_calls(self, number: int, field: str) -> None:
        self._num_calls += number
        _check_count(self._num_calls, MAX_CALLS, "calls", field)

    def add_arguments(self, number: int, field: str) -> None:
        self._num_arguments += number
        _check_count(self._num_arguments, MAX_ARGUMENTS, "arguments", field)


def _check_count(number: int, most: int, what: str, field: str) -> None:
    if number > most:
        raise RequestError(
            f"{field} and the calls before it have {number} {what}; at most {most} are allowed", param=field
        )


def parse_tool_calls(calls: object, field: str, count: CallCount | None = None) -> tuple[ToolCall, ...]:
    """Read `tool_calls` of an assistant message; RequestError names the field that is wrong."""
    count = count or CallCount()
    parsed: list[ToolCall] = []
    known: set[str] = set()
    listed = read_list(calls, field, "tool calls")
    count.add_calls(len(listed), field)
    for index, given in enumerate(listed):
        call = _parse_call(read_object(given, f"{field}[{index}]"), f"{field}[{index}]", count)
        if call.call_id in known:
            param = f"{field}[{index}].id"
            raise RequestError(f"{param} is {shown(call.call_id)}, which another call has already", param=param)
        known.add(call.call_id)
        parsed.append(call)
    return tuple(parsed)


def tools_channel(calls: tuple[ToolCall, ...]) -> Iterator[Segment]:
    """The channel that holds the calls of one answer, numbered from 1; nothing without calls."""
    if not calls:
        return
    yield from open_tag("tools")
    for index, call in enumerate(calls, start=1):
        yield from open_tag("call", {"tool": call.name, "index": str(index)})
        if call.raw is not None:
            yield from element("json", call.raw, {"type": "object"})
        for argument in call.arguments:
            yield from element("argument", argument.text, {"key": argument.key, "type": argument.type})
        yield from close_tag("call")
    yield from close_tag("tools")


def _parse_call(call: Mapping[str, object], field: str, count: CallCount) -> ToolCall:
    # `index` is left over where a client has put a stream together
    check_keys(call, ("id", "type", "function", "index"), "a tool call", field)
    if call.get("type") not in (None, "function"):
        param = f"{field}.type"
        raise RequestError(f"{param} is {shown(call['type'])}; allowed is 'function'", param=param)
    call_id = read_name(call.get("id"), f"{field}.id")
    field = f"{field}.function"
    function = read_object(call.get("function"), field)
    check_keys(function, ("name", "arguments"), "a called function", field)
    name = read_name(function.get("name"), f"{field}.name")
    arguments, raw = _parse_arguments(function.get("arguments"), f"{field}.arguments", count)
    return ToolCall(call_id, name, arguments, raw)


def _parse_arguments(given: object, field: str, count: CallCount) -> tuple[tuple[Argument, ...], str | None]:
    """The arguments in their own order, and the text itself where it is no JSON."""
    if given is None:
        return (), None
    if isinstance(given, Mapping):
        return _write_arguments(given, field, count), None
    if not isinstance(given, str):
        raise wrong_type(given, "a string of JSON or an object", field)
    check_encodable(given, param=field)
    if not given.strip():
        return (), None
    try:
        value = json.loads(given)
    except RecursionError as error:
        raise not_json(error, field) from error
    except ValueError:
        return (), given
    if not isinstance(value, dict):
        raise RequestError(f"{field} is JSON, but {shown(given)} is not an object", param=field)
    return _write_arguments(value, field, count), None


def _write_arguments(values: Mapping[str, object], field: str, count: CallCount) -> tuple[Argument, ...]:
    count.add_arguments(len(values), field)
    arguments = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise wrong_type(key, "strings as keys", field)
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise not_json(error, field) from error
        check_encodable(key, param=field)
        check_encodable(text, param=field)
        arguments.append(Argument(key, _json_type(value), text))
    return tuple(arguments)


def _json_type(value: object) -> str:
    # a bool is also an int
    kinds = ((bool, "boolean"), ((int, float), "number"), (str, "string"), (Mapping, "object"))
    if value is None:
        return "null"
    return next((name for kind, name in kinds if isinstance(value, kind)), "array")
