"""The official `anthropic` client against the server."""

import base64
import json

import anthropic
import httpx2
import pytest

from perilune.config.media import MediaConfig
from perilune.engine.request import FinishReason, RequestOutput
from tests.server.conftest import DEADLINE_S, END, MODEL_NAME, THOUGHT
from tests.text.images.pictures import file_of, photo

TURNS = [{"role": "user", "content": "hello"}]
TOOLS = [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}]
CALL = (
    "hm<|close|>think<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="string"<|sep|>a "b"<|close|>argument<|sep|>'
    '<|open|>argument key="n" type="number"<|sep|>1.5<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


@pytest.fixture
def talk(serve):
    """Start a server and give it with a client."""

    def start(*arguments, prefix="", **options):
        server = serve(*arguments, max_model_len=4096, **options)
        client = anthropic.Anthropic(
            base_url=server.url + prefix, api_key="none", max_retries=0, timeout=httpx2.Timeout(DEADLINE_S)
        )
        return server, client

    return start


def ask(client, **fields):
    return client.messages.create(**{"model": MODEL_NAME, "max_tokens": 200, "messages": TURNS, **fields})


def streamed(client, **fields):
    with client.messages.stream(**{"model": MODEL_NAME, "max_tokens": 200, "messages": TURNS, **fields}) as stream:
        events = list(stream)
        return events, stream.get_final_message()


@pytest.mark.parametrize("prefix", ["", "/anthropic"])
def test_an_answer_thinks_in_a_block_of_its_own(talk, prefix):
    server, client = talk(THOUGHT + "hello 你好" + END, prefix=prefix)
    message = ask(client)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "hm🌙"
    assert message.content[0].signature
    assert message.content[1].text == "hello 你好"
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.usage.input_tokens == len(server.engine.requests[0].prompt_token_ids)
    assert message.id.startswith("msg_")


@pytest.mark.parametrize("says", [THOUGHT + "hello 你好" + END, CALL, "hello" + END, THOUGHT + END])
def test_a_stream_adds_up_to_the_whole_answer(talk, says):
    _, client = talk(says)
    whole = ask(client, tools=TOOLS).model_dump(exclude={"id"})
    _, final = streamed(client, tools=TOOLS)
    total = final.model_dump(exclude={"id"})
    if says == "hello" + END:
        # what has been streamed as thinking cannot be taken back; it comes again as the text
        assert total["content"].pop(0)["type"] == "thinking"
    for block in total["content"]:
        # the client's own, where it has put a stream together
        block.pop("parsed_output", None)
    assert total == whole


def test_the_events_of_a_stream_come_in_order(talk):
    server, _ = talk(CALL)
    body = {"model": MODEL_NAME, "max_tokens": 200, "messages": TURNS, "tools": TOOLS, "stream": True}
    lines = server.http.post("/v1/messages", json=body).text.split("\n\n")[:-1]
    kinds = [line.split("\n")[0].removeprefix("event: ") for line in lines]
    data = [json.loads(line.split("\ndata: ")[1]) for line in lines]
    assert kinds == [event["type"] for event in data]
    assert (kinds[0], kinds[1], kinds[-2], kinds[-1]) == (
        "message_start",
        "content_block_start",
        "message_delta",
        "message_stop",
    )
    open_index, next_index = None, 0
    for event in data:
        if event["type"] == "content_block_start":
            assert (open_index, event["index"]) == (None, next_index)
            open_index, next_index = next_index, next_index + 1
        elif event["type"].startswith("content_block"):
            assert event["index"] == open_index
            open_index = None if event["type"] == "content_block_stop" else open_index
    deltas = [event["delta"]["type"] for event in data if event["type"] == "content_block_delta"]
    assert deltas.index("signature_delta") < deltas.index("input_json_delta")
    assert data[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_tool_is_used_and_answered(talk):
    server, client = talk(CALL)
    message = ask(client, tools=TOOLS)
    use = message.content[-1]
    assert (use.type, use.name, message.stop_reason) == ("tool_use", "f", "tool_use")
    assert use.input == {"x": 'a "b"', "n": 1.5}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "fine"}]}
    turns = [
        *TURNS,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    ask(client, tools=TOOLS, messages=turns)
    openai_turns = [
        *TURNS,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": use.id, "type": "function", "function": {"name": "f", "arguments": use.input}}],
        },
        {"role": "tool", "tool_call_id": use.id, "content": "fine"},
        {"role": "user", "content": "go on"},
    ]
    function = {"name": "f", "description": "d", "parameters": TOOLS[0]["input_schema"]}
    body = {"model": MODEL_NAME, "messages": openai_turns, "tools": [{"type": "function", "function": function}]}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.requests[-1].prompt_token_ids == server.engine.requests[-2].prompt_token_ids


def test_thinking_can_be_turned_off_and_the_system_speaks_first(talk, tokenizer):
    server, client = talk("hello" + END)
    message = ask(
        client,
        thinking={"type": "disabled"},
        system=[{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
    )
    assert [block.type for block in message.content] == ["text"]
    assert 'message role="system"<|sep|>be kind' in tokenizer.decode(server.engine.requests[0].prompt_token_ids)


def test_an_answer_at_the_end_is_continued(talk, tokenizer):
    server, client = talk(" world" + END)
    ask(client, messages=[*TURNS, {"role": "assistant", "content": "hello"}])
    assert tokenizer.decode(server.engine.requests[0].prompt_token_ids).endswith("response<|sep|>hello")


def test_a_stop_sequence_and_a_limit_are_told(talk):
    _, client = talk(THOUGHT + "hello world" + END)
    message = ask(client, stop_sequences=[" wor"])
    assert (message.stop_reason, message.stop_sequence, message.content[-1].text) == ("stop_sequence", " wor", "hello")
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"


def test_tokens_are_counted_as_they_are_billed(talk):
    _, client = talk()
    count = client.messages.count_tokens(model=MODEL_NAME, messages=TURNS, tools=TOOLS)
    assert count.input_tokens == ask(client, tools=TOOLS).usage.input_tokens


def test_cached_tokens_are_counted_apart(talk):
    def script(request):
        return [RequestOutput(request.request_id, (104,), None, None, FinishReason.LENGTH, None, None, 90, 7, 1)]

    server, client = talk(script)
    usage = ask(client).usage
    assert usage.cache_read_input_tokens == 7
    assert usage.input_tokens == len(server.engine.requests[0].prompt_token_ids) - 7


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [*TURNS, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[1].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "1", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "what"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": TOOLS}, "tool_choice.name"),
        ({"thinking": {"type": "what"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"output_config": {"effort": "what"}}, "output_config.effort"),
        ({"mcp_servers": [1]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"what": 1}, "what"),
    ],
)
def test_a_bad_field_is_named_in_the_shape_of_this_api(serve, fields, named):
    server = serve()
    answer = server.http.post("/v1/messages", json={"model": MODEL_NAME, "max_tokens": 9, "messages": TURNS, **fields})
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert named in error["error"]["message"]
    assert server.engine.requests == []


def test_errors_are_those_that_the_client_knows(talk):
    _, client = talk()
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        ask(client, model="sun")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(client, extra_body={"temperature": -1})


def test_a_failure_in_mid_stream_is_an_error_event(talk):
    def script(request):
        return [
            RequestOutput(request.request_id, (104,), None, None, None, None, None, 5, 0, 1),
            RequestOutput(request.request_id, (), None, None, FinishReason.ERROR, None, "the engine failed", 5, 0, 1),
        ]

    _, client = talk(script)
    with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
        streamed(client)


def test_leaving_frees_the_request(serve, tokenizer):
    endless = tokenizer.encode("hello" * 40)
    server = serve(lambda request: endless, delay_s=0.05, max_model_len=4096)
    body = {"model": MODEL_NAME, "max_tokens": 400, "messages": TURNS, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as response:
        next(response.iter_bytes())
    server.wait_until_idle()
    assert server.engine.num_aborts == 1


def test_the_system_may_speak_in_the_middle_of_a_conversation(talk, tokenizer):
    server, client = talk("hello" + END)
    ask(client, messages=[*TURNS, {"role": "system", "content": [{"type": "text", "text": "be kind"}]}])
    assert 'role="system"<|sep|>be kind<|close|>' in tokenizer.decode(server.engine.requests[0].prompt_token_ids)


def test_a_tool_may_give_a_picture_and_a_bad_one_is_named(talk, tokenizer):
    server, client = talk("hello" + END, media=MediaConfig())
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(photo(60, 40))).decode()}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a.png"}]}
    result["content"].append({"type": "image", "source": source})
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    messages = [*TURNS, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    ask(client, messages=messages, tools=TOOLS)
    (request,) = server.engine.requests
    assert len(request.images) == 1
    assert 'index="1"<|sep|>a.png<|close|>message' in tokenizer.decode(request.prompt_token_ids)
    assert client.messages.count_tokens(model=MODEL_NAME, messages=messages, tools=TOOLS).input_tokens == len(
        request.prompt_token_ids
    )
    source["data"] = source["data"][:60]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[2\]\.content\[0\]\.content\[1\]\.source"):
        ask(client, messages=messages, tools=TOOLS)


def test_the_tool_runner_of_the_official_client_loops_over_calls(talk, tokenizer):
    """It first asks the server to hold the conversation, and must learn that this one does not."""
    calls, answer = tokenizer.encode_markup(CALL), tokenizer.encode_markup(THOUGHT + "hello" + END)
    server, client = talk(lambda request: answer if len(server.engine.requests) else calls)

    @anthropic.beta_tool
    def f(x: str, n: float) -> str:
        """d"""
        return x + str(n)

    runner = client.beta.messages.tool_runner(model=MODEL_NAME, max_tokens=200, tools=[f], messages=TURNS)
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]
    assert 'tool="f" index="1"<|sep|>a "b"1.5<|close|>' in tokenizer.decode(server.engine.requests[1].prompt_token_ids)
