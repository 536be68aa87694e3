"""Reads the messages of a chat request into typed ones; refuses what cannot be encoded, naming the field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from perilune.errors import RequestError
from perilune.text.images.picture import Picture
from perilune.text.images.reader import ImageReader
from perilune.text.prompt.calls import CallCount, ToolCall, parse_tool_calls
from perilune.text.prompt.fields import (
    check_keys,
    read_flag,
    read_list,
    read_name,
    read_object,
    read_text,
    shown,
    wrong_type,
)
from perilune.text.prompt.tools import Tool, Toolbox

Role = Literal["system", "user", "assistant", "tool"]

# `developer` is the newer name for the same thing; the model knows only `system`.
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_KEYS: Mapping[Role, tuple[str, ...]] = {
    "system": ("role", "content", "name", "tools"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "partial"),
    "tool": ("role", "content", "tool_call_id", "name", "tool"),
}
_DETAILS = (None, "auto", "low", "high")
_NO_VIDEO = "is 'video_url', and how the model reads videos is not published; send single frames as image_url"


@dataclass(frozen=True)
class ChatMessage:
    """One turn.

    `reasoning`, `tool_calls` and `is_partial` (an answer that the model is to continue) belong to the assistant,
    `tools` to the system. For a tool, `name` is that of the tool, and `index` counts the results of one answer from 1;
    `order_results` in prompt/results.py fills both. `parts` are texts and pictures in their order, where the user
    sent pictures; `content` is then empty. The pictures of a result are its `parts`, and its texts are its `content`.
    """

    role: Role
    content: str
    parts: tuple[str | Picture, ...] = ()
    name: str | None = None
    reasoning: str = ""
    is_partial: bool = False
    tools: tuple[Tool, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    index: int = 0


def parse_messages(
    messages: object, toolbox: Toolbox | None = None, images: ImageReader | None = None
) -> tuple[ChatMessage, ...]:
    """Check every message; raises RequestError whose `param` names the field, as in `messages[2].role`.

    Tools that system messages declare are added to `toolbox`. `images` opens pictures; None for a model that sees none.
    """
    given = read_list(messages, "messages", "messages")
    if not given:
        raise RequestError("messages is empty; give at least one message", param="messages")
    toolbox = toolbox or Toolbox()
    count = CallCount()
    parsed = tuple(_parse(message, f"messages[{index}]", toolbox, images, count) for index, message in enumerate(given))
    for index, message in enumerate(parsed[:-1]):
        if message.is_partial:
            field = f"messages[{index}].partial"
            raise RequestError(f"{field} is true, but only the last message can be continued", param=field)
    return parsed


def _parse(given: object, field: str, toolbox: Toolbox, images: ImageReader | None, count: CallCount) -> ChatMessage:
    message = read_object(given, field)
    role = _parse_role(message.get("role"), f"{field}.role")
    check_keys(message, _KEYS[role], f"a message from {role}", field)
    if role == "assistant":
        return _parse_assistant(message, field, count)
    if role == "tool":
        return _parse_tool_result(message, field, images)
    if message.get("tools") not in (None, []):
        return _parse_tools(message, field, toolbox)
    name = _parse_name(message, "name", field)
    if role == "user":
        return _parse_user(message.get("content"), f"{field}.content", name, images)
    return ChatMessage(role=role, content=_parse_content(message.get("content"), f"{field}.content"), name=name)


def _parse_user(content: object, field: str, name: str | None, images: ImageReader | None) -> ChatMessage:
    if not _has_images(content):
        return ChatMessage("user", _parse_content(content, field), name=name)
    return ChatMessage("user", "", parts=_parse_parts(content, field, images), name=name)


def _parse_parts(content: object, field: str, images: ImageReader | None) -> tuple[str | Picture, ...]:
    """Texts and pictures; neighbouring texts are one."""
    assert isinstance(content, Sequence)
    parts: list[str | Picture] = []
    for index, given in enumerate(content):
        part = read_object(given, f"{field}[{index}]")
        if part.get("type") == "image_url":
            parts.append(_parse_image(part, f"{field}[{index}]", images))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += _parse_part(part, f"{field}[{index}]")
        else:
            parts.append(_parse_part(part, f"{field}[{index}]"))
    return tuple(parts)


def _has_images(content: object) -> bool:
    if isinstance(content, str | bytes) or not isinstance(content, Sequence):
        return False
    return any(isinstance(part, Mapping) and part.get("type") == "image_url" for part in content)


def _parse_image(part: Mapping[str, object], field: str, images: ImageReader | None) -> Picture:
    if images is None:
        raise RequestError(
            f"{field}.type is 'image_url', and this model has no vision weights; send text only",
            param=f"{field}.type",
            code="unsupported",
        )
    check_keys(part, ("type", "image_url"), "a part with a picture", field)
    field = f"{field}.image_url"
    given = part.get("image_url")
    if isinstance(given, str):
        return images.open(given, field)
    image = read_object(given, field)
    check_keys(image, ("url", "detail"), "image_url", field)
    if image.get("detail") not in _DETAILS:
        raise RequestError(
            f"{field}.detail is {shown(image['detail'])}; allowed are auto, low and high, which mean the same here",
            param=f"{field}.detail",
        )
    return images.open(read_name(image.get("url"), f"{field}.url"), f"{field}.url")


def _parse_role(role: object, field: str) -> Role:
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{field} is {shown(role)}; allowed are {', '.join(_ROLES)}", param=field)
    return _ROLES[role]


def _parse_assistant(message: Mapping[str, object], field: str, count: CallCount) -> ChatMessage:
    is_partial = read_flag(message.get("partial"), f"{field}.partial")
    calls = message.get("tool_calls")
    if calls and is_partial:
        param = f"{field}.tool_calls"
        raise RequestError(f"{param} stands beside partial; an answer with calls cannot be continued", param=param)
    return ChatMessage(
        role="assistant",
        content=_parse_optional_content(message, field),
        name=_parse_name(message, "name", field),
        reasoning=_parse_reasoning(message, field),
        is_partial=is_partial,
        tool_calls=() if calls is None else parse_tool_calls(calls, f"{field}.tool_calls", count),
    )


def _parse_tool_result(message: Mapping[str, object], field: str, images: ImageReader | None) -> ChatMessage:
    names = [_parse_name(message, key, field) for key in ("tool", "name")]
    parts: tuple[str | Picture, ...] = ()
    if _has_images(message.get("content")):
        parts = _parse_parts(message["content"], f"{field}.content", images)
    return ChatMessage(
        role="tool",
        content="".join(part for part in parts if isinstance(part, str))
        if parts
        else _parse_optional_content(message, field),
        parts=tuple(part for part in parts if not isinstance(part, str)),
        name=next((name for name in names if name is not None), None),
        tool_call_id=read_name(message.get("tool_call_id"), f"{field}.tool_call_id"),
    )


def _parse_tools(message: Mapping[str, object], field: str, toolbox: Toolbox) -> ChatMessage:
    """A system message that declares tools holds nothing else."""
    if _parse_optional_content(message, field):
        param = f"{field}.content"
        raise RequestError(f"{param} stands beside tools and would not be read; send two messages", param=param)
    if message.get("name") is not None:
        param = f"{field}.name"
        raise RequestError(f"{param} stands beside tools and would not be read; leave it out", param=param)
    return ChatMessage("system", "", tools=toolbox.declare(message["tools"], f"{field}.tools"))


def _parse_optional_content(message: Mapping[str, object], field: str) -> str:
    content = message.get("content")
    return "" if content is None else _parse_content(content, f"{field}.content")


def _parse_content(content: object, field: str) -> str:
    if isinstance(content, str):
        return read_text(content, field)
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise wrong_type(content, "a string or a list of text parts", field)
    return "".join(_parse_part(part, f"{field}[{index}]") for index, part in enumerate(content))


def _parse_part(given: object, field: str) -> str:
    part = read_object(given, field)
    kind = part.get("type")
    if kind != "text":
        problem = (
            f"is {shown(kind)}, which is not known; allowed are text and, in messages from user or tool, image_url"
        )
        if kind == "image_url":
            problem = "is 'image_url', and pictures are read in messages from user or tool only; allowed is 'text'"
        elif kind == "video_url":
            problem = _NO_VIDEO
        raise RequestError(f"{field}.type {problem}", param=f"{field}.type")
    return read_text(part.get("text"), f"{field}.text")


def _parse_name(message: Mapping[str, object], key: str, field: str) -> str | None:
    name = message.get(key)
    return None if name is None else read_name(name, f"{field}.{key}")


def _parse_reasoning(message: Mapping[str, object], field: str) -> str:
    """`reasoning` is the newer name that some servers answer with; both may be echoed, the first one counts."""
    for key in ("reasoning_content", "reasoning"):
        if message.get(key) is not None and (text := read_text(message[key], f"{field}.{key}")):
            return text
    return ""
