import json

from perilune.verify.quality.asking import _joined, read_answer, request_of
from perilune.verify.quality.questions import Answer, Call, Question
from perilune.verify.quality.settings import Setting

CALL = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": '{"town": "Rome"}'}}


def test_text_and_calls_of_a_message_are_read():
    assert read_answer({"content": " 1+1=2\n"}) == Answer("1+1=2")
    assert read_answer({"content": None, "tool_calls": [CALL]}) == Answer("", (Call("get_time", {"town": "Rome"}),))


def test_arguments_that_are_no_object_are_kept_as_text():
    for text in ("{", "[1]"):
        call = {"function": {"name": "get_time", "arguments": text}}
        assert read_answer({"content": "", "tool_calls": [call]}).calls == (Call("get_time", {"": text}),)


def test_a_stream_adds_up_to_the_message():
    deltas = [
        {"role": "assistant", "content": ""},
        {"content": "It "},
        {"content": "is"},
        {"tool_calls": [{"index": 1, "function": {"name": "b", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "get_time", "arguments": '{"town":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Rome"}'}}]},
    ]
    lines = [f"data: {json.dumps({'choices': [{'delta': delta}]})}" for delta in deltas]
    found = read_answer(_joined([*lines, "", "data: [DONE]"]))
    assert found == Answer("It is", (Call("get_time", {"town": "Rome"}), Call("b", {})))


def test_a_request_has_what_the_question_has_and_what_the_setting_says():
    bare = Question("sums", [{"role": "user", "content": "1+1="}], [], None, Answer("1+1=2"))
    body = request_of(bare, "demo", Setting("x", is_streamed=True, effort="low"))
    assert body["stream"] is True
    assert (body["temperature"], body["reasoning_effort"]) == (0, "low")
    assert not {"tools", "response_format"} & body.keys()
    form = {"type": "json_object"}
    full = Question("json", bare.messages, [{"type": "function"}], form, Answer("{}"))
    assert request_of(full, "demo", Setting("x"))["tools"] == full.tools
    assert request_of(full, "demo", Setting("x"))["response_format"] == form
