"""Tool calls in answers of the chat completions dialect."""

import json

import openai
import pytest

from tests.server.conftest import DEADLINE_S, END, MAX_MODEL_LEN, MODEL_NAME, THOUGHT, events, joined

O, C, S = "<|open|>", "<|close|>", "<|sep|>"  # noqa: E741
PORT = f'{O}argument key="port" type="string"{S}Brest "你好"{C}argument{S}'
HOURS = f'{O}argument key="hours" type="array"{S}[6,18]{C}argument{S}'
TIDE = f'{O}call tool="get_tide" index="1"{S}{PORT}{HOURS}{C}call{S}'
NOTE = f'{O}call tool="note" index="2"{S}{C}call{S}'
CUT = f'{O}call tool="note" index="2"{S}{PORT[:-30]}'
TOOLS_END = f"{C}tools{S}{C}message{S}<|end_of_msg|>"
CALLS = f"{THOUGHT}hello{C}response{S}{O}tools{S}{TIDE}{NOTE}{TOOLS_END}"
TIDE_ARGUMENTS = '{"port": "Brest \\"你好\\"", "hours": [6, 18]}'

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_tide", "note")]
TURNS = [{"role": "user", "content": "hello"}]


@pytest.fixture
def serve_calls(serve):
    """Start a server whose model makes two calls, or says something else."""
    return lambda says=CALLS: serve(says, max_model_len=4 * MAX_MODEL_LEN)


def call_deltas(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [call for choice in choices for call in choice["delta"].get("tool_calls", ())]


def put_together(deltas):
    """The calls as they stand in a whole answer."""
    calls = []
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
        else:
            assert delta["index"] == len(calls) - 1
            assert delta.keys() == {"index", "function"}
            assert delta["function"].keys() == {"arguments"}
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def test_calls_are_part_of_the_message(serve_calls):
    choice = serve_calls().chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hello",
        "reasoning_content": "hm🌙",
        "tool_calls": [
            {"id": "get_tide_0", "type": "function", "function": {"name": "get_tide", "arguments": TIDE_ARGUMENTS}},
            {"id": "note_1", "type": "function", "function": {"name": "note", "arguments": "{}"}},
        ],
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)


def test_a_stream_says_the_calls_of_the_whole_answer(serve_calls):
    server = serve_calls()
    whole = server.chat(tools=TOOLS).json()
    chunks = events(server.chat(tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    message = whole["choices"][0]["message"]
    assert put_together(call_deltas(chunks)) == message["tool_calls"]
    assert (joined(chunks, "content"), joined(chunks, "reasoning_content")) == ("hello", "hm🌙")
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == whole["usage"]


def test_a_streamed_call_has_the_shape_of_the_stream_specification(serve_calls):
    chunks = events(serve_calls().chat(tools=TOOLS, stream=True))
    deltas = call_deltas(chunks)
    for index, (call_id, name) in enumerate((("get_tide_0", "get_tide"), ("note_1", "note"))):
        first, *rest = (delta for delta in deltas if delta["index"] == index)
        assert first == {
            "index": index,
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        assert all(delta.keys() == {"index", "function"} for delta in rest)
        assert all(list(delta["function"]) == ["arguments"] and delta["function"]["arguments"] for delta in rest)
        json.loads("".join(delta["function"]["arguments"] for delta in rest))
    assert [delta["index"] for delta in deltas] == sorted(delta["index"] for delta in deltas)
    middle = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert all(len(choice["delta"]) == 1 and choice["finish_reason"] is None for choice in middle)
    assert chunks[-1]["choices"][0]["delta"] == {}


def test_a_long_string_is_streamed_as_it_is_made(serve_calls):
    deltas = call_deltas(events(serve_calls().chat(tools=TOOLS, stream=True)))
    pieces = [delta["function"]["arguments"] for delta in deltas if delta["index"] == 0]
    assert pieces[1:4] == ['{"port": "', "B", "res"]


def test_a_cut_call_is_left_out_and_the_answer_ends_by_length(serve_calls):
    server = serve_calls(f"{THOUGHT}{O}tools{S}{TIDE}{CUT}")
    choice = server.chat(tools=TOOLS).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_tide"]
    assert choice["finish_reason"] == "length"
    chunks = events(server.chat(tools=TOOLS, stream=True))
    streamed = put_together(call_deltas(chunks))
    assert streamed[0] == choice["message"]["tool_calls"][0]
    assert [call["id"] for call in streamed] == ["get_tide_0", "note_1"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_nothing_but_a_cut_call_is_an_answer_without_calls(serve_calls):
    choice = serve_calls(f"{THOUGHT}{O}tools{S}{CUT}").chat(tools=TOOLS).json()["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("says", "content", "num_calls"),
    [
        pytest.param(f"hm{O}tools{S}{TIDE}{TOOLS_END}", "", 1, id="thinking not closed"),
        pytest.param(f"hm{O}tools{S}{TIDE}{NOTE}<|end_of_msg|>", "", 2, id="nothing closed"),
        pytest.param(f"hm{C}think{S}{TIDE}{TOOLS_END}", "", 1, id="tools not opened"),
        pytest.param(f"{THOUGHT}hello<|end_of_msg|>", "hello", 0, id="response not closed"),
        pytest.param(f"{THOUGHT}hello{O}tools{S}\n{TIDE}\n{TOOLS_END}", "hello", 1, id="text between the calls"),
        pytest.param(f"hello{END}", "hello", 0, id="thinking skipped"),
    ],
)
def test_a_marker_that_the_model_skips_costs_no_call_and_leaks_nowhere(serve_calls, says, content, num_calls):
    server = serve_calls(says)
    whole = server.chat(tools=TOOLS).json()["choices"][0]
    assert whole["message"]["content"] == content
    assert len(whole["message"].get("tool_calls", ())) == num_calls
    chunks = events(server.chat(tools=TOOLS, stream=True))
    assert put_together(call_deltas(chunks)) == whole["message"].get("tool_calls", [])
    assert joined(chunks, "content") == content
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_an_answer_without_calls_ends_with_stop(serve_calls):
    choice = serve_calls(THOUGHT + "hello" + END).chat(tools=TOOLS).json()["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_to_call_nothing_is_a_call_and_no_markup_leaks(serve_calls, fields):
    server = serve_calls()
    whole = server.chat(**fields).json()["choices"][0]
    assert whole["message"] == {"role": "assistant", "content": "hello", "reasoning_content": "hm🌙"}
    assert whole["finish_reason"] == "stop"
    chunks = events(server.chat(**fields, stream=True))
    assert call_deltas(chunks) == []
    assert joined(chunks, "content") == "hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_tools_declared_in_a_message_can_be_called(serve_calls):
    turns = [{"role": "system", "tools": TOOLS}, *TURNS]
    message = serve_calls().chat(messages=turns).json()["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == ["get_tide_0", "note_1"]


def test_an_answer_with_calls_can_be_sent_back_with_results(serve_calls):
    server = serve_calls()
    message = server.chat(tools=TOOLS).json()["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "3 m"} for call in reversed(message["tool_calls"])
    ]
    answer = server.chat(messages=[*TURNS, message, *results], tools=TOOLS).json()
    assert [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["get_tide_2", "note_3"]


def test_every_choice_has_calls_of_its_own(serve_calls):
    server = serve_calls()
    calls = [choice["message"]["tool_calls"] for choice in server.chat(tools=TOOLS, n=2).json()["choices"]]
    assert [call["id"] for call in calls[0]] == ["get_tide_0", "note_1"]
    assert calls[0] == calls[1]
    chunks = events(server.chat(tools=TOOLS, n=2, stream=True))
    assert [put_together(call_deltas(chunks, index)) for index in (0, 1)] == calls


def test_a_stop_string_in_a_call_is_nothing_special(serve_calls):
    choice = serve_calls().chat(tools=TOOLS, stop=["Brest"]).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == TIDE_ARGUMENTS
    assert choice["finish_reason"] == "tool_calls"


def test_an_answer_ended_by_a_stop_string_ends_with_stop(serve_calls):
    server = serve_calls(f"{THOUGHT}{O}tools{S}{TIDE}{C}tools{S}hello world{END}")
    choice = server.chat(tools=TOOLS, stop=["world"]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("hello ", "stop", "world")
    assert len(choice["message"]["tool_calls"]) == 1


def test_logprobs_are_those_of_the_response(serve_calls, tokenizer):
    server = serve_calls()
    logprobs = server.chat(tools=TOOLS, logprobs=True).json()["choices"][0]["logprobs"]
    assert len(logprobs["content"]) == len(tokenizer.encode("hello"))
    chunks = events(server.chat(tools=TOOLS, logprobs=True, stream=True))
    streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if "logprobs" in choice]
    assert [entry for item in streamed for entry in item["content"]] == logprobs["content"]


def test_many_small_tools_stream_without_error(serve_calls):
    names = [f"tool_{number}" for number in range(20)]
    calls = "".join(f'{O}call tool="{name}" index="1"{S}{C}call{S}' for name in names)
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    server = serve_calls(f"{O}tools{S}{calls}{TOOLS_END}")
    chunks = events(server.chat(tools=tools, stream=True, reasoning_effort="none"))
    assert [call["function"]["name"] for call in put_together(call_deltas(chunks))] == names


def test_the_official_client_puts_streamed_calls_together(serve_calls):
    server = serve_calls()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
    whole = client.chat.completions.create(model=MODEL_NAME, messages=TURNS, tools=TOOLS)
    with client.chat.completions.stream(model=MODEL_NAME, messages=TURNS, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, event.arguments) for event in done] == [("get_tide", TIDE_ARGUMENTS), ("note", "{}")]
    assert final.finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert final.message.content == "hello"
    for streamed, given in zip(final.message.tool_calls, whole.choices[0].message.tool_calls, strict=True):
        assert (streamed.id, streamed.type) == (given.id, given.type)
        assert streamed.function.name == given.function.name
        assert streamed.function.arguments == given.function.arguments
