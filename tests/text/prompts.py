"""Prompts as text: what the tests of the chat format write and expect."""

from typing import Any

import pytest

from perilune.errors import RequestError
from perilune.text.encoding import encode_chat
from perilune.text.tokenizer import Tokenizer

from .conftest import small_ranks

SMALL = Tokenizer.from_ranks(small_ranks())
O, C, S, E = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"  # noqa: E741
USER: dict[str, Any] = {"role": "user", "content": "hi"}
USER_HI = f'{O}message role="user"{S}hi{C}message{S}{E}'
ASSISTANT = f'{O}message role="assistant"{S}'
STUB = f"{ASSISTANT}{O}response{S}"


def system(kind: str, body: str) -> str:
    return f'{O}message role="system" type="{kind}"{S}{body}{C}message{S}{E}'


def effort(level: str) -> str:
    return system(
        "thinking-effort",
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
        "supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={level}`.",
    )


def shown(messages: list[dict[str, Any]], **options: Any) -> str:
    return SMALL.decode(encode_chat(messages, SMALL, **options).token_ids)


def refusal(messages: list[dict[str, Any]], **options: Any) -> RequestError:
    """What is said about a request that cannot be encoded; it must begin with the field."""
    with pytest.raises(RequestError) as raised:
        encode_chat(messages, SMALL, **options)
    error = raised.value
    assert error.param is not None
    assert str(error).startswith(error.param)
    return error


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def call(call_id: str, name: str, arguments: Any = None) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*tool_calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(tool_calls)}


def result(call_id: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}
