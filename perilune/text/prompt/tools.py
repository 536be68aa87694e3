"""The tools of a request: those declared before the conversation or on the way, and which of them may be called."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from perilune.errors import RequestError
from perilune.text.prompt.fields import (
    check_keys,
    json_fence,
    read_flag,
    read_list,
    read_object,
    read_text,
    shown,
    wrong_type,
)
from perilune.text.prompt.segments import Segment, system_message

MAX_TOOLS = 512
MAX_NAME_CHARS = 256

_NAME = re.compile(r"[^\W\d][\w.:/-]*")
_HEAD = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_HEAD_OF_NEW = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}


@dataclass(frozen=True)
class Tool:
    """A declared function at `field` of the request; `spec` is the client's whole object, which the model sees."""

    name: str
    spec: Mapping[str, object]
    field: str


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may or must call tools; `name` is the only one that it may call."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


class Toolbox:
    """All tools of a request by name, in the order of their declaration."""

    def __init__(self) -> None:
        self.tools: dict[str, Tool] = {}

    def declare(self, tools: object, field: str) -> tuple[Tool, ...]:
        """Check tools and add them; RequestError for a malformed one, one that is there already, or too many."""
        declared = []
        for index, given in enumerate(read_list(tools, field, "tools")):
            tool = _parse_tool(given, f"{field}[{index}]")
            if tool.name in self.tools:
                param = f"{field}[{index}].function.name"
                raise RequestError(f"{param} is {tool.name!r}, which another tool has already", param=param)
            if len(self.tools) == MAX_TOOLS:
                raise RequestError(f"{field} brings more than {MAX_TOOLS} tools, which is the limit", param=field)
            self.tools[tool.name] = tool
            declared.append(tool)
        return tuple(declared)

    def callable_with(self, choice: ToolChoice) -> tuple[Tool, ...]:
        """The tools that the next answer may call."""
        if choice.mode == "none":
            return ()
        return tuple(tool for tool in self.tools.values() if choice.name in (None, tool.name))


def parse_tool_choice(choice: object, toolbox: Toolbox) -> ToolChoice:
    """Read `tool_choice`; RequestError if it demands a call that no declared tool can answer."""
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        if not toolbox.tools:
            raise RequestError("tool_choice is 'required', but the request declares no tools", param="tool_choice")
        return ToolChoice("required")
    allowed = 'allowed are auto, none, required and {"type": "function", "function": {"name": ...}}'
    if not isinstance(choice, Mapping):
        raise RequestError(f"tool_choice is {shown(choice)}; {allowed}", param="tool_choice")
    if choice.get("type") != "function":
        param = "tool_choice.type"
        raise RequestError(f"{param} is {shown(choice.get('type'))}; {allowed}", param=param)
    check_keys(choice, ("type", "function"), "a tool choice", "tool_choice")
    name = read_object(choice.get("function"), "tool_choice.function").get("name")
    if not isinstance(name, str) or name not in toolbox.tools:
        param = "tool_choice.function.name"
        declared = ", ".join(toolbox.tools) or "none"
        raise RequestError(f"{param} is {shown(name)}; the tools of this request are: {declared}", param=param)
    return ToolChoice("required", name)


def tool_declaration(tools: Sequence[Tool], field: str) -> list[Segment]:
    """The message before the conversation that shows the model its tools."""
    return system_message("tool-declare", _HEAD + _fence(tools, field))


def new_tool_declaration(tools: Sequence[Tool], field: str) -> list[Segment]:
    """The message inside the conversation that shows the model more tools."""
    return system_message("tool-declare", _HEAD_OF_NEW + _fence(tools, field))


def tool_choice_message(choice: ToolChoice) -> list[Segment]:
    """The message that demands or forbids calls; a single allowed tool is a demand too."""
    return [] if choice.mode == "auto" else system_message("tool-choice", _CHOICES[choice.mode])


def _fence(tools: Sequence[Tool], field: str) -> str:
    return json_fence([tool.spec for tool in tools], field)


def _parse_tool(given: object, field: str) -> Tool:
    spec = read_object(given, field)
    if spec.get("type") != "function":
        param = f"{field}.type"
        raise RequestError(f"{param} is {shown(spec.get('type'))}; allowed is 'function'", param=param)
    field = f"{field}.function"
    function = read_object(spec.get("function"), field)
    name = _parse_tool_name(function.get("name"), f"{field}.name")
    if function.get("description") is not None:
        read_text(function["description"], f"{field}.description")
    if function.get("parameters") is not None and not isinstance(function["parameters"], Mapping):
        raise wrong_type(function["parameters"], "an object (a JSON schema)", f"{field}.parameters")
    read_flag(function.get("strict"), f"{field}.strict")
    return Tool(name, spec, field)


def _parse_tool_name(name: object, field: str) -> str:
    if not isinstance(name, str):
        raise wrong_type(name, "a string", field)
    if len(name) > MAX_NAME_CHARS:
        raise RequestError(f"{field} has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed", param=field)
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{field} is {shown(name)}; a name begins with a letter or _ and goes on with letters, digits or _ - . : /",
            param=field,
        )
    return name
