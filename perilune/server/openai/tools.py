"""Tool calls in the OpenAI chat dialect: those of earlier answers, and how an answer shows its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from perilune.server.choice import Piece
from perilune.text.channels import collect


def earlier_call_ids(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The ids of the calls in checked messages."""
    return tuple(call["id"] for message in messages for call in message.get("tool_calls") or ())


def whole_calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The calls of a finished answer; one that was cut is left out."""
    ids = [piece.call_id for piece in pieces if piece.call_id is not None]
    calls = collect(piece.delta for piece in pieces).calls
    # only the last call can have been cut
    return [_function_call(call_id, call.name, call.arguments) for call_id, call in zip(ids, calls, strict=False)]


def call_delta(piece: Piece) -> dict[str, Any]:
    """What one piece of a call is in a stream: the name once and whole, then text that adds up to the arguments."""
    part = piece.delta.call
    assert part is not None
    if part.name is None or piece.call_id is None:
        call: dict[str, Any] = {"function": {"arguments": piece.text}}
    else:
        call = _function_call(piece.call_id, part.name, piece.text)
    return {"tool_calls": [{"index": part.index, **call}]}


def _function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
