"""Reads the messages of a chat request into typed ones; refuses what cannot be encoded, naming the field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from perilune.errors import RequestError
from perilune.text.tokenizer import check_encodable

Role = Literal["system", "user", "assistant"]

# `developer` is the newer name for the same thing; the model knows only `system`.
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES_TO_COME = ("tool",)
_KEYS: Mapping[Role, tuple[str, ...]] = {
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "reasoning", "partial"),
}
_KEYS_TO_COME: Mapping[Role, tuple[str, ...]] = {"system": ("tools",), "user": (), "assistant": ("tool_calls",)}
_PARTS_TO_COME = ("image", "image_url")


@dataclass(frozen=True)
class ChatMessage:
    """One turn. `reasoning` belongs to the assistant; `is_partial` marks an answer that the model is to continue."""

    role: Role
    content: str
    name: str | None = None
    reasoning: str = ""
    is_partial: bool = False


def parse_messages(messages: object) -> tuple[ChatMessage, ...]:
    """Check every message; raises RequestError whose `param` names the field, as in `messages[2].role`."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is {type(messages).__name__}, expected a list of messages", param="messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    parsed = tuple(_parse(message, f"messages[{index}]") for index, message in enumerate(messages))
    for index, message in enumerate(parsed[:-1]):
        if message.is_partial:
            field = f"messages[{index}].partial"
            raise RequestError(f"{field} is true, but only the last message can be continued", param=field)
    return parsed


def _parse(message: object, field: str) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(f"{field} is {type(message).__name__}, expected an object", param=field)
    role = _parse_role(message.get("role"), f"{field}.role")
    _check_keys(message, role, field)
    content = message.get("content")
    if role == "assistant" and content is None:
        content = ""
    return ChatMessage(
        role=role,
        content=_parse_content(content, f"{field}.content"),
        name=_parse_name(message.get("name"), f"{field}.name"),
        reasoning=_parse_reasoning(message, field),
        is_partial=_parse_partial(message.get("partial"), f"{field}.partial"),
    )


def _parse_role(role: object, field: str) -> Role:
    allowed = ", ".join(_ROLES)
    if isinstance(role, str) and role in _ROLES_TO_COME:
        raise RequestError(f"{field} is {role!r}, which is not supported yet; allowed are {allowed}", param=field)
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{field} is {role!r}; allowed are {allowed}", param=field)
    return _ROLES[role]


def _check_keys(message: Mapping[str, object], role: Role, field: str) -> None:
    """Keys without a value (null, []) are what clients send back from an answer; they say nothing."""
    for key, value in message.items():
        if key in _KEYS[role] or value is None or value == []:
            continue
        state = "not supported yet" if key in _KEYS_TO_COME[role] else f"not a field of a message from {role}"
        raise RequestError(f"{field}.{key} is {state}; allowed are {', '.join(_KEYS[role])}", param=f"{field}.{key}")


def _parse_content(content: object, field: str) -> str:
    if isinstance(content, str):
        check_encodable(content, param=field)
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{field} is {type(content).__name__}, expected a string or a list of text parts", param=field
        )
    return "".join(_parse_part(part, f"{field}[{index}]") for index, part in enumerate(content))


def _parse_part(part: object, field: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{field} is {type(part).__name__}, expected an object", param=field)
    kind = part.get("type")
    if kind != "text":
        state = "not supported yet" if kind in _PARTS_TO_COME else "not known"
        raise RequestError(f"{field}.type is {kind!r}, which is {state}; allowed is 'text'", param=f"{field}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{field}.text is {type(text).__name__}, expected a string", param=f"{field}.text")
    check_encodable(text, param=f"{field}.text")
    return text


def _parse_name(name: object, field: str) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{field} is {name!r}, expected a string that is not empty", param=field)
    check_encodable(name, param=field)
    return name


def _parse_reasoning(message: Mapping[str, object], field: str) -> str:
    """`reasoning` is the newer name that some servers answer with; both may be echoed, the first one counts."""
    for key in ("reasoning_content", "reasoning"):
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RequestError(f"{field}.{key} is {type(value).__name__}, expected a string", param=f"{field}.{key}")
        check_encodable(value, param=f"{field}.{key}")
        if value:
            return value
    return ""


def _parse_partial(partial: object, field: str) -> bool:
    if partial is not None and not isinstance(partial, bool):
        raise RequestError(f"{field} is {partial!r}, expected true or false", param=field)
    return bool(partial)
