"""Every refusal that Moonshot's verifier of vendors asks for, through each API that has the field.

A row is the wrong part of a request, the field that the error names, and what else it must say. What is allowed right
beside it is taken.
"""

import json

import pytest

from tests.server.conftest import MODEL_NAME

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
BASE = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": [USER]},
    MESSAGES: {"max_tokens": 9, "messages": [USER]},
}
OBJECT = {"type": "object"}


def function(name="f", **more):
    return {"type": "function", "function": {"name": name, "parameters": OBJECT, **more}}


def flat(name="f", **more):
    return {"type": "function", "name": name, "parameters": OBJECT, **more}


def anthropic(name="f", **more):
    return {"name": name, "input_schema": OBJECT, **more}


def without(given, *path):
    """A copy of `given` that lacks one key."""
    copy = json.loads(json.dumps(given))
    *outer, last = path
    inner = copy
    for key in outer:
        inner = inner[key]
    del inner[last]
    return copy


def declared(*tools, **more):
    return {"messages": [{"role": "system", "tools": list(tools), **more}, USER]}


LONG = "n" * 257
NAMES = [("1f", "a letter or _"), ("f@", "a letter or _"), ("", "a letter or _"), (LONG, "at most 256")]

DYNAMIC_TOOLS = [
    ({"messages": [{**USER, "tools": [function()]}]}, "messages[0].tools", "not a field of a message from user"),
    (
        {"messages": [USER, {"role": "assistant", "content": "x", "tools": [function()]}, USER]},
        "messages[1].tools",
        "not a field of a message from assistant",
    ),
    (declared(function(), content="hi"), "messages[0].content", "stands beside tools"),
    (declared(without(function(), "type")), "messages[0].tools[0].type", "allowed is 'function'"),
    (declared(without(function(), "function")), "messages[0].tools[0].function", "expected an object"),
    (declared(without(function(), "function", "name")), "messages[0].tools[0].function.name", "expected a string"),
    (declared({**function(), "type": "plugin"}), "messages[0].tools[0].type", "allowed is 'function'"),
    ({"messages": [{"role": "system", "tools": function()}, USER]}, "messages[0].tools", "expected a list of tools"),
    (declared(None), "messages[0].tools[0]", "expected an object"),
    *((declared(function(name)), "messages[0].tools[0].function.name", says) for name, says in NAMES),
    (declared(function(), function()), "messages[0].tools[1].function.name", "another tool has already"),
    (
        {"messages": [{"role": "system", "tools": [function()]}, {"role": "system", "tools": [function()]}, USER]},
        "messages[1].tools[0].function.name",
        "another tool has already",
    ),
    (
        {**declared(function()), "tools": [function()]},
        "messages[0].tools[0].function.name",
        "another tool has already",
    ),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "string that is not empty"),
]
TOOLS = {
    CHAT: [
        ({"tools": [without(function(), "type")]}, "tools[0].type", "allowed is 'function'"),
        ({"tools": [without(function(), "function")]}, "tools[0].function", "expected an object"),
        ({"tools": [without(function(), "function", "name")]}, "tools[0].function.name", "expected a string"),
        ({"tools": [{**function(), "type": "plugin"}]}, "tools[0].type", "allowed is 'function'"),
        ({"tools": function()}, "tools", "expected array"),
        ({"tools": [None]}, "tools[0]", "expected object"),
        *(({"tools": [function(name)]}, "tools[0].function.name", says) for name, says in NAMES),
        ({"tools": [function(), function()]}, "tools[1].function.name", "another tool has already"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict", "expected true or false"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "an object (a JSON schema)"),
    ],
    RESPONSES: [
        ({"tools": [without(flat(), "type")]}, "tools[0].type", "allowed is 'function'"),
        ({"tools": [without(flat(), "name")]}, "tools[0].name", "expected a string"),
        ({"tools": [flat(type="plugin")]}, "tools[0].type", "allowed is 'function'"),
        ({"tools": flat()}, "tools", "expected array"),
        ({"tools": [None]}, "tools[0]", "expected object"),
        *(({"tools": [flat(name)]}, "tools[0].name", says) for name, says in NAMES),
        ({"tools": [flat(), flat()]}, "tools[1].name", "another tool has already"),
        ({"tools": [flat(strict="yes")]}, "tools[0].strict", "expected true or false"),
        ({"tools": [flat(parameters=[])]}, "tools[0].parameters", "an object (a JSON schema)"),
        ({"input": [USER, {"type": "function_call_output", "output": "x"}]}, "input[1].call_id", "not empty"),
    ],
    MESSAGES: [
        ({"tools": [without(anthropic(), "name")]}, "tools[0].name", "expected a string"),
        ({"tools": [without(anthropic(), "input_schema")]}, "tools[0].input_schema", "is missing"),
        ({"tools": [anthropic(type="plugin")]}, "tools[0].type", "allowed is 'custom'"),
        ({"tools": anthropic()}, "tools", "expected array"),
        ({"tools": [None]}, "tools[0]", "expected object"),
        *(({"tools": [anthropic(name)]}, "tools[0].name", says) for name, says in NAMES),
        ({"tools": [anthropic(), anthropic()]}, "tools[1].name", "another tool has already"),
        ({"tools": [anthropic(strict="yes")]}, "tools[0].strict", "expected true or false"),
        ({"tools": [anthropic(input_schema=[])]}, "tools[0].input_schema", "an object (a JSON schema)"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
            "not empty",
        ),
    ],
}
NO_TOOLS = "the request declares no tools"
TOOL_CHOICE = {
    CHAT: [
        ({"tool_choice": "required"}, "tool_choice", NO_TOOLS),
        ({"tool_choice": "required", "tools": []}, "tool_choice", NO_TOOLS),
        ({"tool_choice": "perhaps", "tools": [function()]}, "tool_choice", "allowed are auto, none, required"),
    ],
    RESPONSES: [
        ({"tool_choice": "required"}, "tool_choice", NO_TOOLS),
        ({"tool_choice": "required", "tools": []}, "tool_choice", NO_TOOLS),
        ({"tool_choice": "perhaps", "tools": [flat()]}, "tool_choice", "allowed are auto, none, required"),
    ],
    MESSAGES: [
        ({"tool_choice": {"type": "any"}}, "tool_choice", NO_TOOLS),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice", NO_TOOLS),
        ({"tool_choice": {"type": "perhaps"}, "tools": [anthropic()]}, "tool_choice.type", "allowed are auto, any"),
    ],
}
NAMED = {"name": "n", "schema": OBJECT, "strict": True}


def form(**changed):
    schema = {key: value for key, value in {**NAMED, **changed}.items() if value is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def text_format(**changed):
    given = {"type": "json_schema", **NAMED, **changed}
    return {"text": {"format": {key: value for key, value in given.items() if value is not None}}}


def output_format(**given):
    return {"output_config": {"format": given}}


KINDS = "allowed are text, json_object, json_schema"
SCHEMA = "response_format.json_schema"
RESPONSE_FORMAT = {
    CHAT: [
        ({"response_format": {"type": "yaml"}}, "response_format.type", KINDS),
        ({"response_format": {"type": "json_schema"}}, SCHEMA, "expected an object"),
        (form(name=None), f"{SCHEMA}.name", "not empty"),
        (form(schema=None), f"{SCHEMA}.schema", "an object (a JSON schema)"),
        (form(strict="yes"), f"{SCHEMA}.strict", "expected true or false"),
        (form(schema=[]), f"{SCHEMA}.schema", "an object (a JSON schema)"),
    ],
    RESPONSES: [
        (text_format(type="yaml"), "text.format.type", KINDS),
        (text_format(name=None), "text.format.name", "not empty"),
        (text_format(schema=None), "text.format.schema", "an object (a JSON schema)"),
        (text_format(strict="yes"), "text.format.strict", "expected true or false"),
        (text_format(schema=[]), "text.format.schema", "an object (a JSON schema)"),
    ],
    MESSAGES: [
        (output_format(type="yaml"), "output_config.format.type", KINDS),
        (output_format(type="json_schema"), "output_config.format.schema", "an object (a JSON schema)"),
        (output_format(type="json_schema", schema=[]), "output_config.format.schema", "an object (a JSON schema)"),
    ],
}
THINKING = {
    CHAT: [
        ({"thinking": {"type": "sometimes"}}, "thinking.type", "allowed are enabled, disabled"),
        ({"thinking": {"effort": "huge"}}, "thinking.effort", "allowed are low, high, max"),
        ({"thinking": {"keep": "none"}}, "thinking.keep", "allowed are all"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "allowed are low, high, max"),
    ],
    RESPONSES: [({"reasoning": {"effort": "huge"}}, "reasoning.effort", "allowed are low, high, max")],
    MESSAGES: [
        ({"thinking": {"type": "sometimes"}}, "thinking.type", "allowed are enabled, adaptive, disabled"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "allowed are low, high, max"),
    ],
}
REFUSED = [(CHAT, *row) for row in DYNAMIC_TOOLS]
REFUSED += [
    (path, *row)
    for table in (TOOLS, TOOL_CHOICE, RESPONSE_FORMAT, THINKING)
    for path, rows in table.items()
    for row in rows
]
NESTED = function(parameters={"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}})
TAKEN = [
    (CHAT, declared(function())),
    (CHAT, {"messages": [USER, {"role": "system", "tools": [function()]}]}),
    (CHAT, declared(function("a"), function("b"), function("c"))),
    (CHAT, {"messages": [{"role": "system", "tools": [function(name)]} for name in "ab"] + [USER]}),
    (CHAT, declared(NESTED)),
    (CHAT, declared(function(strict=False))),
    (CHAT, {**declared(function("a")), "tools": [function("b")]}),
    (CHAT, {**declared(function()), "tool_choice": "required"}),
    (CHAT, declared(without(function(), "function", "parameters"))),
    (CHAT, declared(function("n" * 256))),
    *((CHAT, {"tool_choice": choice}) for choice in ("none", "auto")),
    *((RESPONSES, {"tool_choice": choice}) for choice in ("none", "auto")),
    *((MESSAGES, {"tool_choice": {"type": choice}}) for choice in ("none", "auto")),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [function()]}),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}, "tools": [flat()]}),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}, "tools": [anthropic()]}),
    (CHAT, {"response_format": {"type": "text"}}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    *((CHAT, form(strict=strict)) for strict in (True, False, None)),
    *((RESPONSES, text_format(strict=strict)) for strict in (True, False, None)),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
    (MESSAGES, output_format(type="json_schema", schema=OBJECT)),
    (CHAT, {"thinking": {"type": "enabled", "keep": "all", "effort": "low"}, "reasoning_effort": "high"}),
]


@pytest.fixture(scope="module")
def server(serve_for_module):
    return serve_for_module(max_model_len=8192)


def label(row):
    path, fields, *_ = row
    return f"{path.rsplit('/', 1)[1]}-{json.dumps(fields)[:60]}"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "field", "says"), REFUSED, ids=map(label, REFUSED))
def test_what_must_be_refused_is_a_400_that_names_the_field_and_says_what_is_allowed(
    server, path, fields, field, says, is_stream
):
    body = {"model": MODEL_NAME, **BASE[path], **fields, "stream": is_stream}
    num_requests = len(server.engine.requests)
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(field)
    assert says in error["message"]
    if path == MESSAGES:
        assert answer.json()["type"] == "error"
    else:
        assert error["param"] == field
    assert len(server.engine.requests) == num_requests


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), TAKEN, ids=map(label, TAKEN))
def test_what_must_be_taken_is_answered(server, path, fields, is_stream):
    body = {"model": MODEL_NAME, **BASE[path], **fields, "stream": is_stream}
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
