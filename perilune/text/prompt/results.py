"""Gives the results of tools the order, the numbers and the names of the calls that they answer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from perilune.errors import RequestError
from perilune.text.images.picture import Picture
from perilune.text.messages import ChatMessage
from perilune.text.prompt.calls import ToolCall
from perilune.text.prompt.fields import shown


def order_results(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """The messages with every result named and numbered.

    A run of results is sorted as the calls of the answer before it, unless one of them answers none of these calls:
    then the run keeps its order. Raises RequestError for a result whose tool cannot be told.
    """
    ordered: list[ChatMessage] = []
    calls: tuple[ToolCall, ...] = ()
    num_results = 0
    position = 0
    while position < len(messages):
        message = messages[position]
        if message.role != "tool":
            ordered.append(message)
            if message.role == "assistant":
                calls, num_results = message.tool_calls, 0
            position += 1
            continue
        run = _run_at(messages, position)
        ordered += _resolve(run, position, calls, num_results)
        num_results += len(run)
        position += len(run)
    return tuple(ordered)


def with_pictures(messages: Sequence[ChatMessage]) -> Iterator[tuple[int, ChatMessage]]:
    """Ordered messages with their numbers; behind a run of results that hold pictures, these in a message of the user.

    That is where the model looks for pictures. Such a message has the number of the last result.
    """
    results: list[ChatMessage] = []
    for index, message in enumerate(messages):
        if results and message.role != "tool":
            yield index - 1, _shown(results)
            results = []
        yield index, message
        if message.role == "tool" and message.parts:
            results.append(message)
    if results:
        yield len(messages) - 1, _shown(results)


def _shown(results: Sequence[ChatMessage]) -> ChatMessage:
    parts: list[str | Picture] = []
    for result in results:
        parts += [f"Result of {result.name}, call {result.index}:", *result.parts]
    return ChatMessage("user", "", parts=tuple(parts))


def _run_at(messages: Sequence[ChatMessage], start: int) -> Sequence[ChatMessage]:
    end = start
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return messages[start:end]


def _resolve(run: Sequence[ChatMessage], start: int, calls: Sequence[ToolCall], num_before: int) -> list[ChatMessage]:
    """One run, which begins at message `start` and at result `num_before` of its answer."""
    places = {call.call_id: place for place, call in enumerate(calls)}
    if all(message.tool_call_id in places for message in run):
        run = sorted(run, key=lambda message: places[message.tool_call_id or ""])
        names: list[str | None] = [calls[places[message.tool_call_id or ""]].name for message in run]
    else:
        names = [_name(message, num_before + offset, calls) for offset, message in enumerate(run)]
    for offset, name in enumerate(names):
        if name is None:
            field = f"messages[{start + offset}].tool_call_id"
            known = ", ".join(places) or "none"
            raise RequestError(
                f"{field} is {shown(run[offset].tool_call_id)}, which is no call of the answer before it (its calls: "
                f"{known}); send the id of a call, or the tool's name",
                param=field,
            )
    return [
        replace(message, name=name, index=num_before + offset)
        for offset, (message, name) in enumerate(zip(run, names, strict=True), start=1)
    ]


def _name(message: ChatMessage, position: int, calls: Sequence[ToolCall]) -> str | None:
    """The tool of a result in a run that cannot be sorted: its own name, that of its call, or that of its place."""
    if message.name is not None:
        return message.name
    by_id = next((call.name for call in calls if call.call_id == message.tool_call_id), None)
    return by_id or (calls[position].name if position < len(calls) else None)
