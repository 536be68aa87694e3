import json
import random

from train.skills.dialogue import expected_calls
from train.skills.tools import TOOLS, ToolSource


def dialogues(*, held_out: bool, count: int = 200, turns: int = 1):
    source = ToolSource(random.Random(5), held_out=held_out)
    return [source.dialogue(turns) for _ in range(count)]


def test_the_called_tool_is_declared_and_its_arguments_fit_the_schema():
    kinds = {"string": str, "integer": int, "boolean": bool}
    for dialogue in dialogues(held_out=False, turns=2):
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        for message in dialogue.messages:
            for name, arguments in expected_calls(message):
                properties = declared[name]["properties"]
                values = json.loads(arguments)
                assert values.keys() == properties.keys()
                assert all(type(value) is kinds[properties[key]["type"]] for key, value in values.items())


def test_results_answer_the_calls_and_what_is_said_repeats_them():
    found = [dialogue for dialogue in dialogues(held_out=True) if dialogue.messages[-1]["content"]]
    assert found
    for dialogue in found:
        calls = next(message["tool_calls"] for message in dialogue.messages if message.get("tool_calls"))
        results = [message for message in dialogue.messages if message["role"] == "tool"]
        assert [call["id"] for call in calls] == [result["tool_call_id"] for result in results]


def test_no_request_is_on_both_sides_and_two_calls_are_never_the_same():
    asked = []
    for held_out in (False, True):
        drawn = dialogues(held_out=held_out, count=400)
        asked.append({dialogue.messages[0]["content"] for dialogue in drawn})
        calls = [expected_calls(message) for dialogue in drawn for message in dialogue.messages]
        assert all(len(own) == len(set(own)) for own in calls)
        assert any(len(own) == 2 for own in calls)
    assert len(asked[1]) > 20
    assert not asked[0] & asked[1]


def test_every_report_says_the_result_or_that_it_was_done():
    rng = random.Random(0)
    for tool in TOOLS:
        result = tool.result(rng)
        words = {**tool.draw(rng), "state": "on"}
        told = tool.report.format(result=result, **words)
        assert result in told or result == "done"
