"""The Responses API of the official `openai` client against the server."""

import openai
import pytest

from tests.server.anthropic.test_messages import CALL
from tests.server.conftest import DEADLINE_S, END, MODEL_NAME, THOUGHT

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
def talk(serve):
    """Start a server and give it with a client."""

    def start(*arguments, **options):
        server = serve(*arguments, max_model_len=4096, **options)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
        return server, client

    return start


def test_an_answer_has_its_reasoning_in_an_item_of_its_own(talk):
    server, client = talk(THOUGHT + "hello 你好" + END)
    answer = client.responses.create(model=MODEL_NAME, input="hello", instructions="be kind")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "hm🌙"
    assert answer.output_text == "hello 你好"
    assert (answer.status, answer.error, answer.instructions) == ("completed", None, "be kind")
    assert answer.usage.input_tokens == len(server.engine.requests[0].prompt_token_ids)
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("says", [THOUGHT + "hello 你好" + END, CALL, THOUGHT + END])
@pytest.mark.parametrize("limit", [200, 40, 10, 3])
def test_a_stream_adds_up_to_the_whole_answer(talk, says, limit):
    _, client = talk(says)
    asked = {"model": MODEL_NAME, "input": "hello", "tools": [TOOL], "max_output_tokens": limit}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"

    def content(items):
        return [item.model_dump(exclude={"id"}) for item in items]

    assert content(events[-1].response.output) == content(whole.output)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert content(item for item in done if item.status == "completed") == content(whole.output)
    for item in done:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        deltas = [e.delta for e in events if e.type.endswith(".delta") and e.item_id == item.id]
        assert "".join(deltas) == text
    assert events[-1].response.usage == whole.usage


def test_a_call_is_made_and_answered(talk):
    server, client = talk(CALL)
    first = client.responses.create(model=MODEL_NAME, input="hello", tools=[TOOL])
    call = first.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"x": "a \\"b\\"", "n": 1.5}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
    turns = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in first.output), result]
    client.responses.create(model=MODEL_NAME, input=turns, tools=[TOOL])
    openai_turns = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "tool_calls": [{"id": call.call_id, "function": {"name": "f", "arguments": call.arguments}}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "fine"},
    ]
    function = {key: TOOL[key] for key in ("name", "parameters", "strict")}
    body = {"model": MODEL_NAME, "messages": openai_turns, "tools": [{"type": "function", "function": function}]}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.requests[-1].prompt_token_ids == server.engine.requests[-2].prompt_token_ids


def test_effort_none_turns_thinking_off(talk):
    _, client = talk("hello" + END)
    answer = client.responses.create(model=MODEL_NAME, input="hello", reasoning={"effort": "none"})
    assert [item.type for item in answer.output] == ["message"]


def test_logprobs_come_when_they_are_asked_for(talk):
    _, client = talk("hello" + END)
    answer = client.responses.create(
        model=MODEL_NAME,
        input="hello",
        reasoning={"effort": "none"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    entries = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == "hello"
    assert {len(entry.top_logprobs) for entry in entries} == {2}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": [{"type": "what"}]}, "input[0].type"),
        ({"input": [{"role": "what", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "1"}]}, "tools[0].name"),
        ({"tool_choice": "what"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"reasoning": {"effort": "what"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "what"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["what"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"what": 1}, "what"),
    ],
)
def test_a_bad_field_is_named(serve, fields, param):
    server = serve()
    answer = server.http.post("/v1/responses", json={"model": MODEL_NAME, "input": "hello", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]
    assert server.engine.requests == []


def test_leaving_frees_the_request(serve, tokenizer):
    endless = tokenizer.encode("hello" * 40)
    server = serve(lambda request: endless, delay_s=0.05)
    body = {"model": MODEL_NAME, "input": "hello", "stream": True}
    with server.http.stream("POST", "/v1/responses", json=body) as response:
        next(response.iter_bytes())
    server.wait_until_idle()
    assert server.engine.num_aborts == 1


def test_reasoning_survives_clients_that_carry_only_its_encrypted_content(talk):
    server, client = talk(THOUGHT + "hello" + END)
    fields = {"model": MODEL_NAME, "include": ["reasoning.encrypted_content"]}
    reasoning = client.responses.create(input="hello", **fields).output[0]
    assert client.responses.create(input="hello", model=MODEL_NAME).output[0].encrypted_content is None
    item = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    rest = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
    prompts = []
    for given in (item, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm🌙"}]}):
        client.responses.create(input=[{"role": "user", "content": "hello"}, given, *rest], **fields)
        prompts.append(server.engine.requests[-1].prompt_token_ids)
    assert prompts[0] == prompts[1]
    with pytest.raises(openai.BadRequestError, match="leave the reasoning item out") as refused:
        client.responses.create(input=[{**item, "encrypted_content": "gAAAA"}, *rest], model=MODEL_NAME)
    assert refused.value.param == "input[0].encrypted_content"
