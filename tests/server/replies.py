"""What an answer says, whichever API it came through: whole or put together from its stream."""

import json
from dataclasses import dataclass, field

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)
ENDS = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length", "stop_sequence": "stop"}


@dataclass
class Reply:
    """`calls` are names with arguments as JSON values; `kinds` tells which field each increment of a stream adds to."""

    reasoning: str = ""
    content: str = ""
    calls: list = field(default_factory=list)
    end: str = ""
    kinds: list = field(default_factory=list, compare=False)


def body_for(path, content, tools=(), choice=None, schema=None, **fields):
    """A request that means the same in each API; `tools` are names with schemas, `choice` is required or a name."""
    if path == RESPONSES:
        body = {"input": [{"role": "user", "content": content}]}
        body["tools"] = [{"type": "function", "name": name, "parameters": given} for name, given in tools]
        named = {"type": "function", "name": choice}
        if schema:
            body["text"] = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    elif path == MESSAGES:
        body = {"max_tokens": 4000, "messages": [{"role": "user", "content": content}]}
        body["tools"] = [{"name": name, "input_schema": given} for name, given in tools]
        named = {"type": "tool", "name": choice}
        if schema:
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    else:
        body = {"messages": [{"role": "user", "content": content}]}
        body["tools"] = [{"type": "function", "function": {"name": name, "parameters": given}} for name, given in tools]
        named = {"type": "function", "function": {"name": choice}}
        if schema:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    if choice == "required":
        named = {"type": "any"} if path == MESSAGES else "required"
    if choice:
        body["tool_choice"] = named
    return {**body, **fields}


def read_whole(path, answer):
    """The reply in the JSON of an unstreamed answer."""
    if path == CHAT:
        choice = answer["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        reply = Reply(message.get("reasoning_content", ""), message["content"], end=choice["finish_reason"])
        reply.calls = [(call["name"], json.loads(call["arguments"])) for call in calls]
        return reply
    reply = Reply()
    for item in answer["output" if path == RESPONSES else "content"]:
        if item["type"] in ("function_call", "tool_use"):
            arguments = json.loads(item["arguments"]) if path == RESPONSES else item["input"]
            reply.calls.append((item["name"], arguments))
        else:
            text = item["content"][0]["text"] if path == RESPONSES else item.get("thinking", item.get("text"))
            if item["type"] in ("reasoning", "thinking"):
                reply.reasoning += text
            else:
                reply.content += text
    reply.end = _end_of_response(answer, reply) if path == RESPONSES else ENDS[answer["stop_reason"]]
    return reply


def _end_of_response(answer, reply):
    if answer["status"] == "incomplete":
        return "length"
    return "tool_calls" if reply.calls else "stop"


def read_stream(path, text, *, cut_calls=False):
    """The reply that the deltas of a stream add up to; with `cut_calls` an answer that was cut has none."""
    reply, calls = Reply(), {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event or not event["error"], event
        if path == CHAT:
            _read_chunk(event, reply, calls)
        elif path == RESPONSES:
            _read_event(event, reply, calls)
        else:
            _read_message_event(event, reply, calls)
    if cut_calls and reply.end == "length":
        calls = {}
    reply.calls = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    if path == RESPONSES and reply.end == "stop" and reply.calls:
        reply.end = "tool_calls"
    return reply


def _grow(reply, kind, text):
    if text:
        setattr(reply, kind, getattr(reply, kind) + text)
        reply.kinds.append(kind)


def _add_call(reply, calls, key, name, arguments):
    known = calls.get(key, ("", ""))
    calls[key] = (known[0] + name, known[1] + arguments)
    reply.kinds.append("calls")


def _read_chunk(chunk, reply, calls):
    choice = chunk["choices"][0]
    _grow(reply, "reasoning", choice["delta"].get("reasoning_content"))
    _grow(reply, "content", choice["delta"].get("content"))
    for call in choice["delta"].get("tool_calls", []):
        function = call["function"]
        _add_call(reply, calls, call["index"], function.get("name", ""), function["arguments"])
    reply.end = choice["finish_reason"] or reply.end


def _read_event(event, reply, calls):
    kind = event["type"]
    if kind == "response.reasoning_text.delta":
        _grow(reply, "reasoning", event["delta"])
    elif kind == "response.output_text.delta":
        _grow(reply, "content", event["delta"])
    elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        _add_call(reply, calls, event["output_index"], event["item"]["name"], "")
    elif kind == "response.function_call_arguments.delta":
        _add_call(reply, calls, event["output_index"], "", event["delta"])
    elif kind in ("response.completed", "response.incomplete"):
        reply.end = "stop" if kind == "response.completed" else "length"


def _read_message_event(event, reply, calls):
    if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
        _add_call(reply, calls, event["index"], event["content_block"]["name"], "")
    elif event["type"] == "content_block_delta":
        delta = event["delta"]
        _grow(reply, "reasoning", delta.get("thinking"))
        _grow(reply, "content", delta.get("text"))
        if "partial_json" in delta:
            _add_call(reply, calls, event["index"], "", delta["partial_json"])
    elif event["type"] == "message_delta":
        reply.end = ENDS[event["delta"]["stop_reason"]]
