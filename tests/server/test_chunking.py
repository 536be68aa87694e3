"""However many tokens come at once, an answer is the same in every API, and a stream adds up to it byte for byte."""

import json

import pytest

from perilune.engine.request import FinishReason, RequestOutput
from tests.server.conftest import END, MODEL_NAME, THOUGHT
from tests.server.openai.test_stream_shape import CALLS

NAMES = ("f", "g")
SCHEMA = {"type": "object"}
ANSWERS = {
    "text": THOUGHT + "hello 你好🌙" + END,
    "calls": CALLS,
    "call without the end of thinking": "hm" + CALLS[CALLS.index("<|open|>tools") :],
    "response never closed": THOUGHT + "hello<|end_of_msg|>",
    "no separator after thinking": "hm<|close|>think<|open|>response<|sep|>hello" + END,
    "text that spells a marker": THOUGHT + "<think> a < b" + END,
}
TURNS = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {
        "messages": TURNS,
        "tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
    },
    "/v1/responses": {
        "input": TURNS,
        "tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
    },
    "/v1/messages": {
        "messages": TURNS,
        "max_tokens": 500,
        "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
    },
}


def whole_text(path, answer):
    """Reasoning, content and arguments of a whole answer, in their order."""
    if path == "/v1/chat/completions":
        message = answer["choices"][0]["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        return [text for text in (message["reasoning_content"], message["content"], *calls) if text]
    if path == "/v1/responses":
        return [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in answer["output"]]
    return [block.get("thinking") or block.get("text") or json.dumps(block["input"]) for block in answer["content"]]


def streamed_text(path, text):
    """The same, put together from the deltas."""
    parts: dict[object, str] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if path == "/v1/chat/completions":
            for kind, value in event["choices"][0]["delta"].items():
                if kind == "tool_calls":
                    key, value = value[0]["index"], value[0]["function"]["arguments"]
                else:
                    key = kind
                parts[key] = parts.get(key, "") + value
        elif path == "/v1/responses" and event["type"].endswith(".delta"):
            parts[event["output_index"]] = parts.get(event["output_index"], "") + event["delta"]
        elif path == "/v1/messages" and event["type"] == "content_block_delta":
            delta = {key: value for key, value in event["delta"].items() if key not in ("type", "signature")}
            parts[event["index"]] = parts.get(event["index"], "") + "".join(delta.values())
    parts.pop("role", None)
    ordered = [parts.pop(key) for key in ("reasoning_content", "content") if key in parts]
    texts = [text for text in (*ordered, *parts.values()) if text]
    if path == "/v1/messages":
        # a whole answer shows arguments as an object
        return [json.dumps(json.loads(text)) if text.startswith("{") else text for text in texts]
    return texts


def chunked(tokenizer, says, size):
    token_ids = tokenizer.encode_markup(says)

    def script(request):
        return [
            RequestOutput(
                request_id=request.request_id,
                token_ids=tuple(token_ids[start : start + size]),
                logprobs=None,
                prompt_logprobs=None,
                finish_reason=FinishReason.STOP if start + size >= len(token_ids) else None,
                stop_reason=None,
                error=None,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=0,
                num_output_tokens=min(start + size, len(token_ids)),
            )
            for start in range(0, len(token_ids), size)
        ]

    return script


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ANSWERS)
def test_streams_and_whole_answers_agree_however_tokens_are_grouped(serve, tokenizer, path, name):
    server = serve(max_model_len=4096)
    shown = []
    for size in (1, 2, 3, 7, 10_000):
        server.script = chunked(tokenizer, ANSWERS[name], size)
        body = {"model": MODEL_NAME, **BODIES[path]}
        shown.append(whole_text(path, server.http.post(path, json=body).json()))
        shown.append(streamed_text(path, server.http.post(path, json={**body, "stream": True}).text))
    assert shown[0]
    assert "<|" not in "".join(shown[0])
    assert all(texts == shown[0] for texts in shown)
