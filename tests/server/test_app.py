"""Routes that are no dialect, the key, the limits, and errors in one shape everywhere."""

import re

import pytest

from perilune.errors import CapacityError
from perilune.server.settings import ServerSettings
from tests.server.conftest import END, MAX_MODEL_LEN, MODEL_NAME, events

SHAPE = {"message", "type", "param", "code"}


def test_the_model_is_listed_with_the_context_it_really_has(server):
    expected = {
        "id": MODEL_NAME,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "perilune",
        "max_model_len": MAX_MODEL_LEN,
    }
    assert server.http.get("/v1/models").json() == {"object": "list", "data": [expected]}
    assert server.http.get(f"/v1/models/{MODEL_NAME}").json() == expected
    response = server.http.get("/v1/models/sun")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_health_follows_the_engine(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    server.engine.failure = "the engine died: out of cheese"
    response = server.http.get("/health")
    assert response.status_code == 503
    assert "out of cheese" in response.json()["error"]["message"]
    assert server.chat().status_code == 503
    assert server.chat(stream=True).status_code == 503


def test_clients_that_count_tokens_themselves_learn_how(server, tokenizer):
    told = server.http.get("/tokenizer_info").json()
    assert (told["bos_token"], told["vocab_size"]) == (None, tokenizer.vocab_size)
    counted = server.http.post("/tokenize", json={"prompt": told["eos_token"], "add_special_tokens": True}).json()
    assert counted["tokens"] == [tokenizer.end_of_msg_id]


def test_text_and_token_ids_go_both_ways(server, tokenizer):
    text = "hello 你好 🌙<|open|>"
    counted = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert counted["tokens"] == tokenizer.encode_markup(text)
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert counted["max_model_len"] == MAX_MODEL_LEN
    assert server.http.post("/detokenize", json={"tokens": counted["tokens"]}).json() == {"prompt": text}
    assert server.http.post("/tokenize", json={"prompt": "", "model": MODEL_NAME}).json()["tokens"] == []


def test_a_chat_is_tokenized_as_it_would_be_answered(server, tokenizer):
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"tools": tools, "tool_choice": "none", "reasoning_effort": "low", "response_format": {"type": "text"}}
    assert server.chat("hello <|open|>", **fields).status_code == 200
    body = {"messages": [{"role": "user", "content": "hello <|open|>"}], "return_token_strs": True, **fields}
    counted = server.http.post("/tokenize", json=body).json()
    assert tuple(counted["tokens"]) == server.engine.requests[0].prompt_token_ids
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert "tool-declare" in tokenizer.decode(counted["tokens"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": None}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "thinking": {"x": 1}}, "thinking.x"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "colour": "red"}, "colour"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_malformed_tokenizer_requests_name_the_field(server, path, body, param):
    response = server.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_what_does_not_exist_is_an_error_in_the_same_shape(server):
    response = server.http.get("/v1/nothing")
    assert (response.status_code, set(response.json()["error"])) == (404, SHAPE)
    response = server.http.get("/v1/chat/completions")
    assert (response.status_code, set(response.json()["error"])) == (405, SHAPE)
    assert response.headers["allow"] == "POST"


def test_a_key_guards_everything_but_health_and_metrics(serve):
    server = serve(settings=ServerSettings(api_key="s3cret"))
    wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"Authorization": "Bearer s3cret "}]
    for headers in wrong[:3]:
        for method, path in [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize")]:
            response = server.http.request(method, path, headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["code"], set(error)) == (401, "invalid_api_key", SHAPE)
            assert response.headers["www-authenticate"] == "Bearer"
    server.http.headers["Authorization"] = "Bearer s3cret"
    assert server.http.get("/v1/models").status_code == 200
    assert server.chat().status_code == 200
    server.http.headers["Authorization"] = "Bearer wrong"
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/metrics").status_code == 200


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_over_the_limit_is_refused(serve, is_announced):
    server = serve(settings=ServerSettings(max_body_bytes=1000))
    body = b'{"model": "moon", "prompt": "' + b"x" * 2000 + b'"}'
    response = server.http.post("/v1/completions", content=body if is_announced else iter([body[:900], body[900:]]))
    error = response.json()["error"]
    assert (response.status_code, error["code"], set(error)) == (413, "request_too_large", SHAPE)
    assert "1000" in error["message"]
    assert server.chat().status_code == 200


def test_a_request_that_can_never_fit_is_refused(serve):
    def refuse(request):
        raise CapacityError("the cache holds 5 tokens")

    server = serve(refuse)
    for is_stream in (False, True):
        response = server.chat(stream=is_stream)
        error = response.json()["error"]
        assert (response.status_code, error["code"], set(error)) == (400, "capacity_exceeded", SHAPE)


def test_a_fault_of_ours_is_a_500_that_tells_only_the_log(serve, caplog):
    def fail(request):
        raise KeyError("a secret of another user")

    server = serve(fail)
    for is_stream in (False, True):
        response = server.chat(stream=is_stream)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in response.text
    assert "a secret of another user" in caplog.text


def test_the_document_of_the_api_describes_its_bodies(server):
    document = server.http.get("/openapi.json").json()
    operation = document["paths"]["/v1/chat/completions"]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert {"model", "messages"} <= set(schema["required"])
    assert schema["additionalProperties"] is False
    spelled = server.http.get("/openapi.json").text
    for name in re.findall(r'"#/components/schemas/(\w+)"', spelled):
        assert name in document["components"]["schemas"]


def test_metrics_have_the_names_that_dashboards_know(serve):
    server = serve("hello" + END)
    server.chat()
    events(server.chat(stream=True))
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    label = f'{{model_name="{MODEL_NAME}"}}'
    for line in [
        f"perilune:num_requests_running{label} 0.0",
        f"perilune:num_requests_waiting{label} 0.0",
        f"perilune:kv_cache_usage_perc{label} 0.0",
        f"perilune:num_blocks_free{label} 64.0",
        f"perilune:num_blocks_total{label} 64.0",
        f"perilune:num_state_slots_free{label} 16.0",
        f"perilune:num_preemptions_total{label} 0.0",
        f"perilune:generation_tokens_total{label} 0.0",
        f'perilune:request_success_total{{finished_reason="stop",model_name="{MODEL_NAME}"}} 2.0',
    ]:
        assert line in response.text.splitlines()
    for name in ["time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"]:
        assert f"# TYPE perilune:{name}_seconds histogram" in response.text
    prompt_tokens = sum(len(request.prompt_token_ids) for request in server.engine.requests)
    assert f"perilune:prompt_tokens_total{label} {prompt_tokens}.0" in response.text
