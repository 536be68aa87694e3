from typing import Any

import pytest

from tests.text.prompts import ASSISTANT, USER, USER_HI, C, E, O, S, call, calls, refusal, result, shown, tool

CALLS = calls(call("x", "f"), call("y", "g"))


def written(name: str, index: int, content: str) -> str:
    return f'{O}message role="tool" tool="{name}" index="{index}"{S}{content}{C}message{S}{E}'


def after_calls(*messages: dict[str, Any]) -> str:
    """What stands between the calls and the stub."""
    text = shown([CALLS, *messages], thinking=False)
    return text.partition(f"{C}tools{S}{C}message{S}{E}")[2].removesuffix(f"{ASSISTANT}{O}response{S}")


def test_results_take_the_order_and_the_names_of_their_calls() -> None:
    expected = written("f", 1, "1") + written("g", 2, "2")
    assert after_calls(result("y", "2"), result("x", "1")) == expected
    assert after_calls(result("x", "1"), result("y", "2")) == expected


def test_the_call_is_believed_before_the_name_that_a_result_carries() -> None:
    assert after_calls(result("x", "1", name="stale")) == written("f", 1, "1")


def test_a_run_with_an_unknown_id_keeps_its_order() -> None:
    expected = written("g", 1, "2") + written("h", 2, "3") + written("f", 3, "1")
    assert after_calls(result("y", "2"), result("z", "3", name="h"), result("x", "1")) == expected
    assert after_calls(result("z", "3", tool="h", name="other")) == written("h", 1, "3")


def test_a_result_with_an_unknown_id_has_the_name_of_its_place() -> None:
    assert after_calls(result("p", "1"), result("q", "2")) == written("f", 1, "1") + written("g", 2, "2")


def test_numbers_go_on_through_other_messages_until_the_next_answer() -> None:
    expected = written("g", 1, "2") + USER_HI + written("f", 2, "1")
    assert after_calls(result("y", "2"), USER, result("x", "1")) == expected
    again = shown([CALLS, result("x", "1"), calls(call("x", "h")), result("x", "3")])
    assert written("h", 1, "3") in again


def test_two_results_of_one_call_keep_their_order() -> None:
    expected = written("f", 1, "1") + written("f", 2, "2") + written("g", 3, "3")
    assert after_calls(result("x", "1"), result("y", "3"), result("x", "2")) == expected


@pytest.mark.parametrize("content", ["", None, []])
def test_a_result_may_be_empty(content: Any) -> None:
    assert after_calls(result("x", content)) == written("f", 1, "")


def test_a_result_may_come_in_parts_and_is_not_stripped() -> None:
    parts: Any = [{"type": "text", "text": " a"}, {"type": "text", "text": "b\n"}]
    assert after_calls(result("x", parts)) == written("f", 1, " ab\n")


def test_a_name_is_escaped() -> None:
    assert written("a&amp;&quot;b", 1, "") in shown([calls(call("x", 'a&"b')), result("x", "")])


def test_a_result_whose_tool_cannot_be_told_is_refused() -> None:
    error = refusal([USER, result("x", "1")], tools=[tool()])
    assert error.param == "messages[1].tool_call_id"
    assert "its calls: none" in str(error)
    error = refusal([CALLS, result("x", "1"), result("y", "2"), result("z", "3")])
    assert error.param == "messages[3].tool_call_id"
    assert "its calls: x, y" in str(error)
    assert refusal([CALLS, {"role": "assistant", "content": "b"}, result("x", "1")]).param == "messages[2].tool_call_id"
