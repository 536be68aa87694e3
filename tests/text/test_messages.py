from typing import Any

import pytest

from perilune.errors import RequestError
from perilune.text.messages import ChatMessage, parse_messages

USER = {"role": "user", "content": "hi"}


def test_messages_are_read() -> None:
    assert parse_messages([{"role": "developer", "content": "x", "name": "n"}, USER]) == (
        ChatMessage("system", "x", name="n"),
        ChatMessage("user", "hi"),
    )


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "a",
        "reasoning": "a",
        "tool_calls": [],
        "refusal": None,
        "audio": None,
        "annotations": [],
        "function_call": None,
    }
    assert parse_messages([USER, answer])[1] == ChatMessage("assistant", "b", reasoning="a")


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        ({"role": "function", "content": "x"}, "messages[1].role", "are system, developer, user, assistant, tool"),
        ({"role": ["user"], "content": "x"}, "messages[1].role", "is ['user']; allowed are"),
        ({"content": "x"}, "messages[1].role", "is None; allowed are"),
        ({"role": "user"}, "messages[1].content", "is NoneType, expected a string or a list of text parts"),
        ({"role": "user", "content": 3}, "messages[1].content", "is int"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content", "is dict"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]", "is str, expected an object"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            *("messages[1].content[1].type", "'image_url', and this model has no vision weights; send text only"),
        ),
        ({"role": "user", "content": [{"type": "audio"}]}, "messages[1].content[0].type", "is not known"),
        ({"role": "user", "content": [{"type": []}]}, "messages[1].content[0].type", "is not known"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "is NoneType"),
        ({"role": "user", "content": "x", "name": ""}, "messages[1].name", "that is not empty"),
        ({"role": "user", "content": "x", "name": 1}, "messages[1].name", "is 1"),
        ({"role": "user", "content": "\ud800"}, "messages[1].content", "holds the lone surrogate U+D800"),
        (
            {"role": "user", "content": [{"type": "text", "text": "\udc00"}]},
            *("messages[1].content[0].text", "lone surrogate"),
        ),
        ({"role": "user", "content": "x", "tools": [{}]}, "messages[1].tools", "not a field of a message from user"),
        ({"role": "assistant", "tools": [{}]}, "messages[1].tools", "not a field of a message from assistant"),
        ({"role": "system", "content": "x", "tools": [{}]}, "messages[1].content", "stands beside tools"),
        ({"role": "system", "name": "x", "tools": [{}]}, "messages[1].name", "stands beside tools"),
        ({"role": "system", "tools": []}, "messages[1].content", "is NoneType"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id", "is None, expected a string"),
        ({"role": "tool", "tool_call_id": "", "content": "x"}, "messages[1].tool_call_id", "that is not empty"),
        ({"role": "tool", "tool_call_id": 1, "content": "x"}, "messages[1].tool_call_id", "is 1"),
        ({"role": "tool", "tool_call_id": "a", "tool": ""}, "messages[1].tool", "that is not empty"),
        ({"role": "tool", "tool_call_id": "a", "content": 1}, "messages[1].content", "is int"),
        (
            {"role": "assistant", "partial": True, "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
            *("messages[1].tool_calls", "cannot be continued"),
        ),
        ({"role": "user", "content": "x", "reasoning": "y"}, "messages[1].reasoning", "not a field"),
        ({"role": "assistant", "reasoning": 1}, "messages[1].reasoning", "is int, expected a string"),
        ({"role": "assistant", "reasoning_content": "\ud800"}, "messages[1].reasoning_content", "lone surrogate"),
        ({"role": "assistant", "content": "x", "partial": 1}, "messages[1].partial", "expected true or false"),
        (["user"], "messages[1]", "is list, expected an object"),
    ],
)
def test_a_message_that_cannot_be_encoded_names_its_field(message: Any, param: str, text: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_messages([USER, message])
    assert error.value.param == param
    assert str(error.value).startswith(param)
    assert text in str(error.value)


@pytest.mark.parametrize("messages", [[], None, "hi", {"role": "user"}])
def test_no_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages is") as error:
        parse_messages(messages)
    assert error.value.param == "messages"


def test_only_the_last_message_can_be_continued() -> None:
    with pytest.raises(RequestError, match="only the last message") as error:
        parse_messages([{"role": "assistant", "content": "x", "partial": True}, USER])
    assert error.value.param == "messages[0].partial"
