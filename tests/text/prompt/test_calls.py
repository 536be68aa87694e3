import json
from typing import Any

import pytest

from tests.text.prompts import ASSISTANT, SMALL, USER, C, E, O, S, call, calls, refusal, shown  # noqa: F401


def argument(key: str, kind: str, text: str) -> str:
    return f'{O}argument key="{key}" type="{kind}"{S}{text}{C}argument{S}'


def written(arguments: Any) -> str:
    """What stands inside a call with these arguments."""
    text = shown([calls(call("a", "f", arguments))], thinking=False)
    head = f'{ASSISTANT}{O}response{S}{C}response{S}{O}tools{S}{O}call tool="f" index="1"{S}'
    tail = f"{C}call{S}{C}tools{S}{C}message{S}{E}{ASSISTANT}{O}response{S}"
    assert text.startswith(head)
    assert text.endswith(tail)
    return text[len(head) : len(text) - len(tail)]


ARGUMENTS = [
    ("Brest", "string", "Brest"),
    ("", "string", ""),
    ("1", "string", "1"),
    ('asked "Brest" & <ok>\n', "string", 'asked "Brest" & <ok>\n'),
    (True, "boolean", "true"),
    (False, "boolean", "false"),
    (None, "null", "null"),
    (1, "number", "1"),
    (1.0, "number", "1.0"),
    (-1.5e300, "number", "-1.5e+300"),
    ([6, 18], "array", "[6, 18]"),
    ([], "array", "[]"),
    ({"src": "é", "n": 1.5, "z": None}, "object", '{"src": "é", "n": 1.5, "z": null}'),
]


@pytest.mark.parametrize(("value", "kind", "text"), ARGUMENTS)
def test_an_argument_has_the_type_of_its_json_value(value: Any, kind: str, text: str) -> None:
    assert written({"k": value}) == argument("k", kind, text)
    assert written(json.dumps({"k": value})) == argument("k", kind, text)


def test_arguments_keep_their_order_and_keys_are_escaped() -> None:
    expected = argument("z", "number", "1") + argument("a&quot;b&amp;c", "number", "2")
    assert written('{"z": 1, "a\\"b&c": 2}') == expected


@pytest.mark.parametrize("arguments", [None, "", " \n", {}, "{}"])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    assert written(arguments) == ""


@pytest.mark.parametrize("arguments", ['{"a": 1', "{'a': 1}", "London", '{"a": 1} x'])
def test_arguments_that_are_no_json_stand_as_they_are(arguments: str) -> None:
    assert written(arguments) == f'{O}json type="object"{S}{arguments}{C}json{S}'


def test_calls_are_numbered_behind_reasoning_and_content() -> None:
    message = {**calls(call("a", "f"), call("b", "g")), "content": "b", "reasoning_content": "a"}
    assert (
        f"{O}think{S}a{C}think{S}{O}response{S}b{C}response{S}{O}tools{S}"
        f'{O}call tool="f" index="1"{S}{C}call{S}{O}call tool="g" index="2"{S}{C}call{S}{C}tools{S}'
    ) in shown([message])


@pytest.mark.parametrize("tool_calls", [None, []])
def test_no_calls_leave_no_channel(tool_calls: Any) -> None:
    assert f"{O}tools" not in shown([{"role": "assistant", "content": "b", "tool_calls": tool_calls}])


def test_a_call_may_come_without_type_and_with_the_index_of_a_stream() -> None:
    given = {"id": "a", "index": 0, "function": {"name": "f", "arguments": "{}"}}
    assert shown([calls(given)]) == shown([calls(call("a", "f", "{}"))])


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, ""),
        ({"type": "function", "function": {"name": "f"}}, ".id"),
        ({"id": "", "function": {"name": "f"}}, ".id"),
        ({"id": 1, "function": {"name": "f"}}, ".id"),
        ({"id": "a", "type": "custom", "function": {"name": "f"}}, ".type"),
        ({"id": "a"}, ".function"),
        ({"id": "a", "function": "f"}, ".function"),
        ({"id": "a", "function": {}}, ".function.name"),
        ({"id": "a", "function": {"name": ""}}, ".function.name"),
        ({"id": "a", "function": {"name": "f", "args": "x"}}, ".function.args"),
        ({"id": "a", "function": {"name": "f"}, "name": "f"}, ".name"),
        *(
            (call("a", "f", arguments), ".function.arguments")
            for arguments in ("[]", "1", '"x"', "null", 1, [], '{"a": "\\ud800"}', '{"\\ud800": 1}', "\ud800", {1: 2})
        ),
        (call("a", "f", {"k": {1, 2}}), ".function.arguments"),
        (call("a", "f", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"), ".function.arguments"),
    ],
)
def test_a_malformed_call_is_refused(given: Any, param: str) -> None:
    assert refusal([USER, calls(given)]).param == f"messages[1].tool_calls[0]{param}"


def test_two_calls_of_one_id_are_refused() -> None:
    assert refusal([calls(call("a", "f"), call("a", "g"))]).param == "messages[0].tool_calls[1].id"


@pytest.mark.parametrize("tool_calls", [{}, "x", 1])
def test_what_is_no_list_of_calls_is_refused(tool_calls: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": tool_calls}
    assert refusal([message]).param == "messages[0].tool_calls"
