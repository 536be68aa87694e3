from typing import Any

import pytest

from perilune.text.encoding import encode_chat
from perilune.text.prompt.tools import MAX_TOOLS
from tests.text.prompts import SMALL, STUB, USER, USER_HI, refusal, shown, system, tool

HEAD = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
NEW = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)


def fence(text: str) -> str:
    return f"```json\n{text}\n```"


def declaring(*tools: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "tools": list(tools), **fields}


def names(messages: list[dict[str, Any]], **options: Any) -> list[str]:
    return [tool.name for tool in encode_chat(messages, SMALL, **options).tools]


def test_tools_stand_first_with_sorted_keys_and_everything_the_client_wrote() -> None:
    given = {"type": "function", "x": 1.0, "function": {"parameters": {"b": [True], "a": {"é": None}}, "name": "f"}}
    body = '[{"function":{"name":"f","parameters":{"a":{"é":null},"b":[true]}},"type":"function","x":1.0}]'
    text = shown([USER], tools=[given], thinking=False)
    assert text == system("tool-declare", HEAD + fence(body)) + USER_HI + STUB
    assert shown([USER], tools=[given]).index("tool-declare") < shown([USER], tools=[given]).index("thinking-effort")


def test_no_tools_leave_no_message() -> None:
    assert shown([USER], tools=[]) == shown([USER], tools=None) == shown([USER])


@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": None}, {"content": []}])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_without_content_declares_more_tools(role: str, content: dict[str, Any]) -> None:
    expected = system("tool-declare", NEW + fence('[{"function":{"name":"f"},"type":"function"}]'))
    text = shown([USER, {"role": role, "tools": [tool()], **content}], thinking=False)
    assert text == USER_HI + expected + STUB


def test_several_tools_can_be_declared_anywhere() -> None:
    messages = [declaring(tool("a"), tool("b")), USER, declaring(tool("c", strict=False))]
    assert names(messages, tools=[tool("d", parameters={"type": "object"})]) == ["d", "a", "b", "c"]


@pytest.mark.parametrize("name", ["f", "_f", "get-weather", "file.path", "functions.f:0", "天气", "x" * 256])
def test_a_name_of_a_tool(name: str) -> None:
    assert names([USER], tools=[tool(name)]) == [name]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, ""),
        ("f", ""),
        ({"function": {"name": "f"}}, ".type"),
        ({"type": "builtin", "function": {"name": "f"}}, ".type"),
        ({"type": "function"}, ".function"),
        ({"type": "function", "function": "f"}, ".function"),
        ({"type": "function", "function": {}}, ".function.name"),
        *((tool(name), ".function.name") for name in (None, 1, "", "1f", "@f", "a b", "<f>", 'f"', "f\n", "x" * 257)),
        (tool(description=1), ".function.description"),
        (tool(parameters=[]), ".function.parameters"),
        (tool(parameters="{}"), ".function.parameters"),
        (tool(strict="yes"), ".function.strict"),
    ],
)
def test_a_malformed_tool_is_refused_wherever_it_is_declared(given: Any, param: str) -> None:
    assert refusal([USER], tools=[tool("good"), given]).param == f"tools[1]{param}"
    assert refusal([USER, declaring(given)]).param == f"messages[1].tools[0]{param}"


@pytest.mark.parametrize("tools", [{"name": "f"}, "f", 1, True])
def test_what_is_no_list_of_tools_is_refused(tools: Any) -> None:
    assert refusal([USER], tools=tools).param == "tools"
    assert refusal([USER, {"role": "system", "tools": tools}]).param == "messages[1].tools"


def test_content_beside_tools_is_refused() -> None:
    assert refusal([USER, declaring(tool(), content="x")]).param == "messages[1].content"
    assert refusal([USER, declaring(tool(), content=[{"type": "text", "text": "x"}])]).param == "messages[1].content"
    assert refusal([USER, declaring(tool(), name="x")]).param == "messages[1].name"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_only_system_messages_declare_tools(role: str) -> None:
    assert refusal([{"role": role, "content": "x", "tools": [tool()]}]).param == "messages[0].tools"


def test_a_name_that_is_taken_is_refused() -> None:
    assert refusal([USER], tools=[tool(), tool()]).param == "tools[1].function.name"
    assert refusal([declaring(tool(), tool())]).param == "messages[0].tools[1].function.name"
    assert refusal([declaring(tool()), declaring(tool())]).param == "messages[1].tools[0].function.name"
    assert refusal([declaring(tool())], tools=[tool()]).param == "messages[0].tools[0].function.name"


def test_too_many_tools_are_refused() -> None:
    tools = [tool(f"f{index}") for index in range(MAX_TOOLS)]
    assert len(names([USER], tools=tools)) == MAX_TOOLS
    assert f"more than {MAX_TOOLS} tools" in str(refusal([USER, declaring(tool())], tools=tools))


@pytest.mark.parametrize("value", [float("nan"), {1}, "\ud800", {1: 1, "a": 2}])
def test_what_is_no_json_is_refused(value: Any) -> None:
    assert refusal([USER], tools=[tool(parameters={"x": value})]).param == "tools"
    assert refusal([declaring(tool(parameters={"x": value}))]).param == "messages[0].tools"


def test_a_tool_that_is_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert refusal([USER], tools=[tool(parameters={"x": deep})]).param == "tools"
    assert refusal([USER], tools=[tool()], tool_choice=deep).param == "tool_choice"


@pytest.mark.parametrize("choice", ["none", "required"])
@pytest.mark.parametrize("messages", [[USER], [{"role": "assistant", "content": "b", "partial": True}]])
def test_a_choice_stands_behind_the_conversation(choice: str, messages: list[dict[str, Any]]) -> None:
    must = "MUST" if choice == "required" else "MUST NOT"
    calls = "call tools" if choice == "required" else "call any tools"
    body = f"The system is invoked with `tool_choice={choice}`.\nYou {must} {calls} in the next message."
    text = shown(messages, tools=[tool()], tool_choice=choice, thinking=False)
    before, _, after = text.partition(system("tool-choice", body))
    assert before + after == shown(messages, tools=[tool()], thinking=False)
    assert after.startswith(STUB)


def test_the_tools_that_may_be_called_follow_the_choice() -> None:
    tools = [tool("a"), tool("b")]
    assert names([USER], tools=tools, tool_choice="auto") == ["a", "b"]
    assert names([USER], tools=tools, tool_choice="required") == ["a", "b"]
    assert names([USER], tools=tools, tool_choice="none") == []
    assert names([USER], tools=tools, tool_choice=tool("b")) == ["b"]
    assert names([USER, declaring(tool("c"))], tool_choice="required") == ["c"]
    assert names([USER], tool_choice="none") == names([USER], tool_choice="auto") == []


def test_a_named_tool_is_a_demand_to_the_model() -> None:
    tools = [tool("a"), tool("b")]
    assert shown([USER], tools=tools, tool_choice=tool("b")) == shown([USER], tools=tools, tool_choice="required")


@pytest.mark.parametrize("tools", [None, []])
def test_a_call_without_tools_cannot_be_demanded(tools: Any) -> None:
    assert refusal([USER], tools=tools, tool_choice="required").param == "tool_choice"
    assert refusal([USER], tools=tools, tool_choice=tool("a")).param == "tool_choice.function.name"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("always", "tool_choice"),
        ("", "tool_choice"),
        (True, "tool_choice"),
        (["f"], "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "allowed_tools"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "name": "f"}, "tool_choice.name"),
        (tool("g"), "tool_choice.function.name"),
        (tool(["f"]), "tool_choice.function.name"),
    ],
)
def test_a_choice_that_is_not_known_is_refused(choice: Any, param: str) -> None:
    assert refusal([USER], tools=[tool()], tool_choice=choice).param == param
