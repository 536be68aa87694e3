"""Bad input to every API is answered with a 4xx that names what is wrong, and leaves other requests alone."""

import json

import pytest

from tests.server.conftest import END, MODEL_NAME, THOUGHT
from tests.server.replies import body_for

TURN = {"role": "user", "content": "hello"}
BODIES = {
    "/v1/chat/completions": {"model": MODEL_NAME, "messages": [TURN]},
    "/v1/completions": {"model": MODEL_NAME, "prompt": "hello"},
    "/v1/responses": {"model": MODEL_NAME, "input": [TURN]},
    "/v1/messages": {"model": MODEL_NAME, "max_tokens": 9, "messages": [TURN]},
    "/v1/messages/count_tokens": {"model": MODEL_NAME, "messages": [TURN]},
    "/tokenize": {"model": MODEL_NAME, "messages": [TURN]},
}
GENERATING = [path for path in BODIES if "tok" not in path]
SPEAKING = [path for path in BODIES if "completions" not in path or "chat" in path]


def post(server, path, content):
    answer = server.http.post(path, content=content)
    assert 400 <= answer.status_code < 500, answer.text
    assert server.engine.requests == []
    return answer.json()["error"]["message"]


def with_field(path, name, value):
    return json.dumps({**BODIES[path], name: value}).encode()


def conversation(path):
    return "input" if path == "/v1/responses" else "messages"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nul", b'{"model": "\xff"}', b"\x00", b'"x"', b'{"a":1}{"b":2}'])
def test_what_is_no_json_object_is_refused(serve, path, body):
    assert post(serve(), path, body)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("depth", [2_000, 1_000_000])
def test_deep_nesting_is_refused(serve, path, depth):
    name = "prompt" if path == "/v1/completions" else conversation(path)
    body = json.dumps(BODIES[path])[:-1].encode() + b', "' + name.encode() + b'": ' + b"[" * depth + b"]" * depth + b"}"
    assert post(serve(), path, body)


@pytest.mark.parametrize("path", SPEAKING)
def test_a_schema_that_is_nested_too_deeply_is_no_fault_of_the_server(serve, path):
    schema: dict = {}
    for _ in range(400):
        schema = {"type": "object", "properties": {"x": schema}}
    tool = {"name": "f", "parameters": schema}
    if "messages" in path:
        tools = [{"name": "f", "input_schema": schema}]
    else:
        tools = [{"type": "function", **tool} if "responses" in path else {"type": "function", "function": tool}]
    server = serve()
    answer = server.http.post(path, content=with_field(path, "tools", tools))
    assert answer.status_code < 500, answer.text


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"1"', b"[1]", b"-1", b"true"])
def test_a_temperature_that_is_no_finite_number_is_refused(serve, path, number):
    body = json.dumps(BODIES[path])[:-1].encode() + b', "temperature": ' + number + b"}"
    post(serve(), path, body)


@pytest.mark.parametrize("path", SPEAKING)
@pytest.mark.parametrize("role", ["what", "", None, 1, ["user"], "function"])
def test_an_unknown_role_is_refused(serve, path, role):
    message = post(serve(), path, with_field(path, conversation(path), [{"role": role, "content": "x"}]))
    assert f"{conversation(path)}[0].role" in message
    assert "allowed are" in message


@pytest.mark.parametrize("path", SPEAKING)
def test_a_thousand_tools_are_refused_with_the_limit(serve, path):
    name = "input_schema" if "messages" in path else "parameters"
    functions = [{"name": f"f{index}", name: {"type": "object"}} for index in range(1000)]
    if "messages" in path:
        tools = functions
    elif "responses" in path:
        tools = [{"type": "function", **function} for function in functions]
    else:
        tools = [{"type": "function", "function": function} for function in functions]
    message = post(serve(), path, with_field(path, "tools", tools))
    assert "tools" in message
    assert "512" in message


@pytest.mark.parametrize("path", [path for path in GENERATING if path != "/v1/completions"])
def test_a_million_blanks_are_refused_with_the_limit(serve, path):
    body = with_field(path, conversation(path), [{"role": "user", "content": " " * 1_000_000}])
    assert "512 tokens" in post(serve(), path, body)


@pytest.mark.parametrize("path", BODIES)
def test_a_body_over_the_limit_is_refused_with_the_limit(serve, path):
    message = post(serve(), path, b" " * (32 * 1024 * 1024 + 1))
    assert str(32 * 1024 * 1024) in message


def test_arguments_that_are_no_json_are_kept_as_they_are(serve, tokenizer):
    """The model is shown what it wrote itself; a repaired history would be another one."""
    call = {"id": "f_0", "type": "function", "function": {"name": "f", "arguments": "{x"}}
    turns = [TURN, {"role": "assistant", "content": "", "tool_calls": [call]}, TURN]
    server = serve(max_model_len=4096)
    body = {"model": MODEL_NAME, "messages": turns}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert "{x<|close|>json" in tokenizer.decode(server.engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize("arguments", ["[1]", "1", '"x"'])
def test_arguments_that_are_no_object_are_refused(serve, arguments):
    call = {"id": "f_0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [TURN, {"role": "assistant", "content": "", "tool_calls": [call]}, TURN]
    path = "/v1/chat/completions"
    message = post(serve(max_model_len=4096), path, with_field(path, "messages", turns))
    assert "messages[1].tool_calls[0].function.arguments" in message


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [1, "x", [], {}, True])
def test_a_model_of_a_wrong_type_or_name_is_refused(serve, path, value):
    assert "model" in post(serve(), path, with_field(path, "model", value))


def test_bad_requests_leave_a_running_answer_alone(serve, tokenizer):
    says = tokenizer.encode_markup(THOUGHT + "hello world" + END)
    server = serve(lambda request: says, delay_s=0.01)
    body = {**BODIES["/v1/chat/completions"], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for path in BODIES:
            assert server.http.post(path, content=b"{").status_code == 400
            assert server.http.post(path, content=b"[" * 100_000).status_code == 400
        text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in text


@pytest.mark.parametrize("path", BODIES)
def test_thirty_megabytes_of_text_are_refused_before_they_are_encoded(serve, path, tokenizer, monkeypatch):
    encoded = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, *more: encoded.append(len(text)) or encode(text, *more))
    name = "prompt" if path == "/v1/completions" else conversation(path)
    text = "hello " * 5_000_000
    body = with_field(path, name, text if name == "prompt" else [{"role": "user", "content": text}])
    server = serve()
    answer = server.http.post(path, content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "512 tokens" in error["message"]
    field = "prompt" if name == "prompt" else f"{name}[0]"
    assert field in error["message"]
    if path not in ("/v1/messages", "/v1/messages/count_tokens"):
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert sum(encoded) < 1000
    assert server.engine.requests == []


def nested(depth):
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE_SCHEMAS = [
    pytest.param({"enum": [f"v{n}" for n in range(100_000)]}, ".enum", "at most 8192", id="hundred thousand values"),
    pytest.param({"type": "array", "maxItems": 10**12}, ".maxItems", "at most 65536", id="huge bound"),
    pytest.param({"type": "string", "minLength": 10**30}, ".minLength", "at most 65536", id="huger bound"),
    pytest.param(nested(100), "", "64 levels", id="nested"),
    pytest.param({"anyOf": [{"const": n} for n in range(300)]}, ".anyOf", "at most 256", id="alternatives"),
    pytest.param(
        {"type": "object", "properties": {f"p{n}": {} for n in range(1100)}},
        ".properties",
        "at most 1024",
        id="properties",
    ),
    pytest.param({"enum": ["x" * 1_200_000]}, "", "at most 1048576", id="a megabyte"),
]


@pytest.mark.parametrize("path", [path for path in GENERATING if path != "/v1/completions"])
@pytest.mark.parametrize(("schema", "below", "says"), HOSTILE_SCHEMAS)
def test_a_hostile_schema_is_refused_with_its_place_and_the_limit(serve, path, schema, below, says):
    field = {"/v1/responses": "text.format.schema", "/v1/messages": "output_config.format.schema"}.get(
        path, "response_format.json_schema.schema"
    )
    server = serve(max_model_len=2_000_000)
    body = {"model": MODEL_NAME, **body_for(path, "hello", schema=schema)}
    message = post(server, path, json.dumps(body).encode())
    assert message.startswith(field + below)
    assert says in message


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "a" * 20_000}, "structured_outputs.regex has 20000 characters; at most 16384"),
        ({"choice": ["x"] * 10_000}, "structured_outputs.choice has 10000 texts; it must hold 1 to 8192"),
        ({"grammar": "start: " + '"x"' * 500_000}, "structured_outputs.grammar and what else constrains"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_hostile_form_is_refused_with_its_field_and_the_limit(serve, path, form, says):
    assert says in post(serve(max_model_len=2_000_000), path, with_field(path, "structured_outputs", form))


@pytest.mark.parametrize("path", SPEAKING)
@pytest.mark.parametrize("key", ["content", "input"])
def test_null_numbers_and_objects_where_text_belongs_are_refused(serve, path, key):
    name = conversation(path)
    if key == "content":
        for value in (None, 5, True, {"a": 1}, [5], [None], [{"type": "text", "text": 5}], [{"type": 5}]):
            message = post(serve(), path, with_field(path, name, [{"role": "user", "content": value}]))
            assert f"{name}[0].content" in message
    else:
        for value in (None, 5, True, {"a": 1}, [5], [None]):
            assert name in post(serve(), path, with_field(path, name, value))


def called(*arguments):
    calls = [
        {"id": f"f_{number}", "type": "function", "function": {"name": "f", "arguments": given}}
        for number, given in enumerate(arguments)
    ]
    return [TURN, {"role": "assistant", "content": "", "tool_calls": calls}, TURN]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("turns", "says"),
    [
        (called(json.dumps({f"k{n}": 1 for n in range(1000)})), "the context of 512 tokens is too small"),
        (called(json.dumps({f"k{n}": 1 for n in range(70_000)})), "70000 arguments; at most 65536"),
        (called(*["{}"] * 17_000), "17000 calls; at most 16384"),
    ],
)
def test_a_history_of_too_many_calls_or_arguments_is_refused_before_it_is_written(serve, path, turns, says):
    message = post(serve(), path, with_field(path, "messages", turns))
    assert says in message
    assert "messages[1]" in message


@pytest.mark.parametrize(
    ("path", "name", "value", "says"),
    [
        ("/v1/chat/completions", "messages", [TURN] * 5000, "messages has 5000 entries; at most 4096"),
        ("/v1/messages", "messages", [TURN] * 5000, "messages has 5000 entries; at most 4096"),
        ("/v1/responses", "input", [TURN] * 40_000, "input has 40000 entries; at most 32768"),
        ("/v1/responses", "tools", [{}] * 600, "tools has 600 entries; at most 512"),
        ("/v1/messages", "tools", [{}] * 600, "tools has 600 entries; at most 512"),
        ("/v1/chat/completions", "logit_bias", {f"x{n}": 1 for n in range(2000)}, "2000 entries; at most 1024"),
        ("/v1/completions", "prompt", ["a"] * 500, "500 answers; at most 128"),
        ("/v1/completions", "prompt", [-1] * 600, "the prompt has 600"),
        ("/detokenize", "tokens", [-1] * 600, "tokens has 600 entries; at most 512"),
    ],
)
def test_too_many_entries_are_refused_before_any_is_read(serve, path, name, value, says):
    body = {**BODIES.get(path, {}), name: value}
    assert says in post(serve(), path, json.dumps(body).encode())


def test_millions_of_token_ids_are_refused_by_their_number_before_any_is_looked_at(server):
    # a number that is no id stands in the midst and is not what the refusal tells of
    ids = [1] * 1_000_000 + [-1]
    answer = server.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": ids, "max_tokens": 3})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "1000001" in error["message"]
