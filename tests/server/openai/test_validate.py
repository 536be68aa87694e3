"""Every malformed request gets a 4xx in the OpenAI error shape that names the field, and harms nobody."""

import json

import pytest

from perilune.errors import RequestError
from perilune.server.openai.schema import ChatRequest, CompletionRequest
from perilune.server.openai.validate import decode_body
from tests.server.conftest import END, MODEL_NAME

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"model": MODEL_NAME, "messages": [USER]}
COMPLETION = {"model": MODEL_NAME, "prompt": "hello"}

WRONG_IN_BOTH = [
    ({"nonsense": 1}, "nonsense"),
    ({"model": 5}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 10**30}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": ["a"] * 1000}, "stop"),
    ({"stop": "x" * 10_000}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"sing": True}}, "stream_options.sing"),
    ({"user": 5}, "user"),
]
WRONG_IN_CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages[0].mood"),
    ({"messages": [USER] * 5000}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"effort": "extreme"}}, "thinking.effort"),
    ({"thinking": {"keep": "some"}}, "thinking.keep"),
    ({"thinking": {"budget": 5}}, "thinking.budget"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking.type"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"preserve_thinking": False}}, "chat_template_kwargs.preserve_thinking"),
    ({"chat_template_kwargs": {"bos": 1}}, "chat_template_kwargs.bos"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [None]}, "tools[0]"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [TOOL] * 1000}, "tools[1].function.name"),
    ({"tools": [{**TOOL, "function": {"name": f"f{index}"}} for index in range(1000)]}, "tools"),
    ({"tools": [TOOL], "messages": [{"role": "system", "tools": [TOOL]}]}, "messages[0].tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": "json_object"}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prompt": "x"}, "prompt"),
    ({"store": "yes"}, "store"),
]
WRONG_IN_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 1000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": 1}, "echo"),
    ({"messages": [USER]}, "messages"),
]
NO_JSON = [
    b"",
    b"null",
    b"[]",
    b"5",
    b"{",
    b'{"model": "moon"',
    b"\xff\xfe",
    b'{"a": \xff}',
    b'{"model": "moon", "messages": [], "temperature": NaN}',
    b'{"model": "moon", "messages": [], "temperature": Infinity}',
    b'{"model": "moon", "messages": [], "temperature": -Infinity}',
    b'{"model": "moon", "messages": [], "temperature": 1e999}',
    b'{"model": "moon", "messages": [], "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "moon", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prediction": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    b'{"model": "moon", "messages": []}}',
]


def assert_refused(response, param):
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


def test_malformed_chat_requests_name_the_field(server):
    for fields, param in WRONG_IN_BOTH + WRONG_IN_CHAT:
        assert_refused(server.http.post("/v1/chat/completions", json={**CHAT, **fields}), param)
    assert server.chat().status_code == 200


def test_malformed_completion_requests_name_the_field(server):
    for fields, param in WRONG_IN_BOTH + WRONG_IN_COMPLETIONS:
        assert_refused(server.http.post("/v1/completions", json={**COMPLETION, **fields}), param)
    assert server.complete().status_code == 200


def test_malformed_requests_for_a_stream_get_no_stream(server):
    for fields, param in WRONG_IN_CHAT:
        assert_refused(server.http.post("/v1/chat/completions", json={**CHAT, "stream": True, **fields}), param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_proper_json_is_refused(server, path):
    for body in NO_JSON:
        response = server.http.post(path, content=body)
        assert response.status_code == 400, body[:60]
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert server.chat().status_code == 200


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(server, missing):
    fields = {name: value for name, value in CHAT.items() if name != missing}
    assert_refused(server.http.post("/v1/chat/completions", json=fields), missing)


def test_another_model_is_not_found(server):
    response = server.chat(model="sun")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert MODEL_NAME in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m" * 10**5},
        {"k" * 10**5: 1},
        {"messages": [{"role": "r" * 10**5}]},
        {"messages": [{**USER, "k" * 10**5: 1}]},
    ],
)
def test_an_error_quotes_no_more_than_a_person_can_read(server, fields):
    response = server.http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert 400 <= response.status_code < 500
    assert len(response.content) < 2000
    assert "..." in response.json()["error"]["message"]


def test_an_unknown_field_is_answered_with_the_known_ones():
    with pytest.raises(RequestError, match=r"temprature is not a field .* temperature,") as raised:
        decode_body(json.dumps({**CHAT, "temprature": 1}).encode(), ChatRequest)
    assert " functions," not in str(raised.value), "what is refused is not allowed"
    with pytest.raises(RequestError, match=r"stream_options\.x is not a field .* include_usage"):
        decode_body(json.dumps({**COMPLETION, "stream_options": {"x": 1}}).encode(), CompletionRequest)


def test_types_are_named_as_json_names_them():
    with pytest.raises(RequestError, match="temperature: expected number or null, got boolean"):
        decode_body(json.dumps({**CHAT, "temperature": True}).encode(), ChatRequest)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": TOOL},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        {"structured_outputs": {"regex": "a+"}},
    ],
)
def test_what_is_demanded_of_an_answer_reaches_the_engine_as_a_grammar_and_can_be_counted(serve, fields):
    server = serve(max_model_len=4096)
    for is_stream in (False, True):
        assert server.chat(tools=[TOOL], stream=is_stream, **fields).status_code == 200
        assert server.engine.requests[-1].grammar is not None
    fields = {name: value for name, value in fields.items() if name in ("tool_choice", "response_format")}
    assert server.http.post("/tokenize", json={"messages": [USER], "tools": [TOOL], **fields}).status_code == 200


def test_an_answer_of_which_nothing_is_demanded_has_no_grammar(server):
    assert server.chat(tools=[TOOL], tool_choice="auto", response_format={"type": "text"}).status_code == 200
    assert server.engine.requests[-1].grammar is None


def test_fields_that_have_no_effect_are_accepted(server):
    assert server.chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        parallel_tool_calls=False,
        prediction={"type": "content", "content": "x"},
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        modalities=["text"],
        stream_options=None,
        logit_bias=None,
        functions=None,
    ).is_success


def test_a_million_blanks_are_refused_quickly_and_others_go_on(serve):
    server = serve("hello" + END)
    for content in (" " * 1_000_000, "\n" * 1_000_000, "x" * 1_000_000):
        assert server.chat(content).json()["error"]["code"] == "context_length_exceeded"
        assert server.complete(content).json()["error"]["code"] == "context_length_exceeded"
    assert server.chat().status_code == 200
