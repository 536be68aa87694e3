"""Structured output over HTTP, with an engine of random weights behind the server."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import httpx
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from perilune.cli.make_checkpoint import write_random_checkpoint
from perilune.config.engine import EngineConfig
from perilune.config.presets import preset_config
from perilune.engine.build import build_engine
from perilune.engine.client import InProcessClient, ModelInfo
from perilune.errors import RequestError
from perilune.server.app import create_app
from perilune.server.openai.schema import ChatRequest
from perilune.server.openai.validate import decode_body
from perilune.server.settings import ServerSettings
from tests.server.conftest import events
from tests.server.replies import APIS, CHAT, MESSAGES, RESPONSES, body_for, read_stream, read_whole

USER = {"role": "user", "content": "go"}
# without bounds its compiler is at work for days
ENDLESS = {"type": "string", "allOf": [{"pattern": f".*{n:03}.*{n:02}"} for n in range(60)]}
OF_ENDLESS = {"type": "object", "properties": {"k": ENDLESS}, "required": ["k"]}
CITY = {"type": "string", "enum": ["Rome", "Oslo", "São Paulo"]}
SCHEMAS = [
    {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 16}},
        "required": ["city"],
    },
    {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}, "x": {"type": "number"}},
        "required": ["code", "x"],
    },
    {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": CITY, "minItems": 1, "maxItems": 3}},
        "required": ["tags"],
    },
    {
        "type": "object",
        "properties": {"at": {"type": "string", "format": "date-time"}, "n": {"type": ["integer", "null"]}},
        "required": ["at", "n"],
    },
    {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}},
        "required": ["p"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "maximum": -3}, "y": {"type": "boolean"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "object",
        "anyOf": [
            {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
            {"properties": {"b": {"const": None}}, "required": ["b"], "additionalProperties": False},
        ],
    },
    {
        "type": "object",
        "properties": {'größe "x"': {"anyOf": [{"type": "boolean"}, {"enum": ["a", 2]}]}},
        "required": ['größe "x"'],
    },
    {"type": "object", "properties": {}, "additionalProperties": False},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "random"
    write_random_checkpoint(
        directory, preset_config("tiny", "k31", has_vision=False, sizes={"vocab_size": 640}), seed=1
    )
    return build_engine(directory, EngineConfig(max_num_seqs=16, cache_bytes=2**26))


@pytest.fixture
def ask(engine):
    """Send chat bodies side by side through the application; gives the responses in their order."""

    def run(*bodies, path="/v1/chat/completions"):
        limits = engine.limits
        model = ModelInfo("random", limits.max_model_len, limits.vocab_size, limits.eos_token_ids, 0)
        app = create_app(InProcessClient(engine, model), engine.tokenizer, ServerSettings())

        async def send():
            transport = httpx.ASGITransport(app)
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://test", timeout=200) as http,
            ):
                return await asyncio.gather(*(http.post(path, json={"model": "random", **body}) for body in bodies))

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, send()).result()

    return run


def ending(engine):
    """What makes a random model come to an end."""
    tokenizer = engine.tokenizer
    return dict.fromkeys((tokenizer.close_id, tokenizer.sep_id), 6) | {ord('"'): 3}


def chat(engine, **fields):
    bias = {str(token_id): value for token_id, value in ending(engine).items()}
    return {"messages": [USER], "temperature": 1, "top_p": 1, "max_tokens": 300, "logit_bias": bias, **fields}


def tool(name, schema, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def of_stream(response):
    """Content, calls by index and finish reason of a stream."""
    content, calls, reason = "", {}, None
    for chunk in events(response):
        choice = chunk["choices"][0]
        content += choice["delta"].get("content", "")
        for call in choice["delta"].get("tool_calls", []):
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            calls[call["index"]] = (name + function.get("name", ""), arguments + function.get("arguments", ""))
        reason = choice["finish_reason"] or reason
    return content, list(calls.values()), reason


def of_whole(response):
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    return (
        choice["message"]["content"],
        [(c["function"]["name"], c["function"]["arguments"]) for c in calls],
        choice["finish_reason"],
    )


def test_every_finished_call_of_a_random_model_is_valid_streamed_and_not(engine, ask):
    kinds = list(product(range(len(SCHEMAS)), ("enabled", "disabled")))
    bodies = [
        chat(engine, tools=[tool("f", SCHEMAS[index])], tool_choice="required", seed=index, thinking={"type": thinking})
        for index, thinking in kinds
    ]
    answers = ask(*bodies, *({**body, "stream": True} for body in bodies))
    num_valid = 0
    for (index, _), whole, stream in zip(kinds, answers[: len(kinds)], answers[len(kinds) :], strict=True):
        assert of_whole(whole) == of_stream(stream), "the same seed says the same in both ways"
        _, calls, reason = of_whole(whole)
        if reason == "length":
            continue
        assert reason == "tool_calls"
        assert calls
        for name, arguments in calls:
            assert name == "f"
            Draft202012Validator(SCHEMAS[index]).validate(json.loads(arguments))
            num_valid += 1
    assert num_valid >= len(kinds) // 2, "too many answers were cut to say anything"


def test_every_finished_json_answer_is_valid_and_without_line_breaks(engine, ask):
    forms = [{"type": "json_schema", "json_schema": {"name": "n", "schema": schema}} for schema in SCHEMAS]
    answers = ask(*(chat(engine, response_format=form, seed=index) for index, form in enumerate(forms)))
    finished = [(SCHEMAS[i], of_whole(answer)[0]) for i, answer in enumerate(answers) if of_whole(answer)[2] == "stop"]
    assert len(finished) >= len(SCHEMAS) // 2
    for schema, content in finished:
        assert "\n" not in content
        Draft202012Validator(schema).validate(json.loads(content))


def test_choice_regex_and_grammar_in_chats_and_completions(engine, ask):
    forms = [
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "a{2}b"}, ("aab",)),
        ({"grammar": 'start: "x" "y"'}, ("xy",)),
    ]
    for structured, allowed in forms:
        (answer,) = ask(chat(engine, structured_outputs=structured))
        assert of_whole(answer)[0] in allowed
        (answer,) = ask({"prompt": "hello", "structured_outputs": structured, "max_tokens": 20}, path="/v1/completions")
        assert answer.json()["choices"][0]["text"] in allowed
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_a_named_tool_and_no_parallel_calls(engine, ask):
    tools = [tool("first", SCHEMAS[0]), tool("second", SCHEMAS[7])]
    named = {"type": "function", "function": {"name": "second"}}
    answers = ask(
        *(chat(engine, tools=tools, tool_choice=named, parallel_tool_calls=False, seed=seed) for seed in range(6))
    )
    finished = [of_whole(answer)[1] for answer in answers if of_whole(answer)[2] != "length"]
    assert finished
    assert all(calls == [("second", "{}")] for calls in finished)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"structured_outputs": {"json": {"contains": {}}}}, "structured_outputs.json", "Unimplemented keys"),
        ({"structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs.json", "Invalid type"),
        (
            {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
            "structured_outputs.json",
            "",
        ),
        ({"structured_outputs": {"json": {"maxItems": 10**12}}}, "structured_outputs.json.maxItems", "at most 65536"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "expected object"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": "a" * 20_000}}, "structured_outputs.regex", "at most 16384"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 8192"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "none of them empty"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar", "unknown name"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"ebnf": "a"}}, "structured_outputs.ebnf", "allowed are json, regex"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "send one",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "leave it out"),
        ({"tools": [tool(f"f{i}", {}) for i in range(1000)], "tool_choice": "required"}, "tools", "more than 512"),
        (
            {"tools": [tool("f", {"type": "object", "required": 3})], "tool_choice": "required"},
            "tools[0].function.parameters",
            "strict to false",
        ),
    ],
)
def test_what_cannot_be_kept_is_a_400_with_its_field_and_leaves_others_alone(engine, ask, fields, param, says):
    good = chat(engine, structured_outputs={"choice": ["fine"]})
    for is_stream in (False, True):
        bad, answer = ask(chat(engine, stream=is_stream, **fields), good)
        assert bad.status_code == 400, bad.text
        error = bad.json()["error"]
        assert error["param"] == param
        assert says in error["message"]
        assert of_whole(answer)[0] == "fine"


FORM = {"type": "json_schema", "name": "n", "schema": ENDLESS}
ASKED_THROUGH_EVERY_API = [
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ENDLESS}},
        },
        "response_format.json_schema.schema",
    ),
    ("/v1/chat/completions", {"messages": [USER], "tools": [tool("f", OF_ENDLESS, strict=True)]}, "tools[0].function."),
    ("/v1/completions", {"prompt": "go", "structured_outputs": {"json": ENDLESS}}, "structured_outputs.json"),
    ("/v1/responses", {"input": "go", "text": {"format": FORM}}, "text.format.schema"),
    (
        "/v1/responses",
        {
            "input": "go",
            "tool_choice": "required",
            "tools": [{"type": "function", "name": "f", "parameters": OF_ENDLESS}],
        },
        "tools[0].parameters",
    ),
    (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": ENDLESS}}},
        "output_config.format.schema",
    ),
    (
        "/v1/messages",
        {
            "messages": [USER],
            "max_tokens": 9,
            "tool_choice": {"type": "any"},
            "tools": [{"name": "f", "input_schema": OF_ENDLESS}],
        },
        "tools[0].input_schema",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), ASKED_THROUGH_EVERY_API)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_schema_that_compiles_for_ever_is_a_400_with_its_field_and_the_limit(ask, path, body, field, is_stream):
    (answer,) = ask({**body, "stream": is_stream}, path=path)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith(field)
    assert "takes more than 1 s of processor time" in message
    if path != "/v1/messages":
        assert answer.json()["error"]["param"].startswith(field)


def test_thirty_two_streams_of_json_objects_at_once_are_json_or_cut(engine, ask):
    bodies = [chat(engine, response_format={"type": "json_object"}, stream=True, seed=seed) for seed in range(32)]
    replies = [of_stream(answer) for answer in ask(*bodies)]
    assert {reason for _, _, reason in replies} <= {"stop", "length"}
    finished = [content for content, _, reason in replies if reason == "stop"]
    assert len(finished) >= 16, "too many answers were cut to say anything"
    assert all(isinstance(json.loads(content), dict) for content in finished)


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
DEMANDS = [
    pytest.param({"tools": [("f", POINT), ("g", POINT)], "choice": "required"}, id="required"),
    pytest.param({"tools": [("f", POINT), ("g", POINT)], "choice": "g"}, id="named"),
    pytest.param({"schema": POINT}, id="schema"),
]


@pytest.mark.parametrize("demand", DEMANDS)
@pytest.mark.parametrize("path", APIS)
def test_thinking_is_free_of_the_grammar_that_holds_after_it_in_every_api(engine, ask, monkeypatch, path, demand):
    """A random model thinks random tokens, which no grammar of an answer would take."""
    # not every API knows a bias
    monkeypatch.setattr("perilune.server.openai.validate.logit_bias", lambda _: ending(engine))
    limit = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}[path]
    body = {**body_for(path, "go", **demand), limit: 200, "temperature": 1, "top_p": 1}
    answers = ask(*([body] * 5), *([{**body, "stream": True}] * 5), path=path)
    replies = [read_whole(path, answer.json()) for answer in answers[:5]]
    replies += [read_stream(path, answer.text, cut_calls=True) for answer in answers[5:]]
    assert all(answer.status_code == 200 for answer in answers)
    assert any(reply.reasoning for reply in replies)
    finished = [reply for reply in replies if reply.end != "length"]
    for reply in finished:
        if "schema" in demand:
            Draft202012Validator(POINT).validate(json.loads(reply.content))
            continue
        assert reply.end == "tool_calls"
        assert {name for name, _ in reply.calls} <= ({"g"} if demand["choice"] == "g" else {"f", "g"})
        for _, arguments in reply.calls:
            Draft202012Validator(POINT).validate(arguments)
    assert finished


def test_while_hostile_schemas_are_compiled_others_are_answered(engine, ask):
    def endless(number):
        return {"type": "string", "allOf": [*ENDLESS["allOf"], {"minLength": number}]}

    hostile = [chat(engine, structured_outputs={"json": endless(number)}) for number in range(6)]
    normal = [chat(engine, structured_outputs={"choice": [f"fine {number}"]}) for number in range(6)]
    answers = ask(*hostile, *normal, chat(engine, max_tokens=5))
    assert [answer.status_code for answer in answers] == [400] * 6 + [200] * 7
    assert [of_whole(answer)[0] for answer in answers[6:12]] == [f"fine {number}" for number in range(6)]


def test_grammars_are_written_apart_from_the_event_loop(engine, ask, monkeypatch):
    threads = []
    write = LLMatcher.grammar_from_lark

    def written(lark):
        threads.append(threading.current_thread().name)
        return write(lark)

    monkeypatch.setattr("perilune.grammar.answer.LLMatcher.grammar_from_lark", written)
    ask(*(chat(engine, max_tokens=9, response_format={"type": "json_object"}) for _ in range(3)))
    assert len(threads) == 3
    assert all(name.startswith("perilune-bodies") for name in threads)


def test_nan_in_a_schema_is_no_json(engine):
    body = json.dumps({"model": "random", **chat(engine, structured_outputs={"json": {"minimum": float("nan")}})})
    with pytest.raises(RequestError, match="not valid JSON"):
        decode_body(body.encode(), ChatRequest)
