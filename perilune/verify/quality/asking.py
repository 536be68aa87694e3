"""Asks a server questions over its chat API, whole or streamed, several at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from perilune.errors import BackendError
from perilune.verify.quality.questions import Answer, Call, Question
from perilune.verify.quality.settings import Setting

MAX_TOKENS = 256
TIMEOUT_S = 600.0
# The only statuses that say something of the request and not of the server.
_REFUSALS = (400, 422)


class RefusedError(Exception):
    """The server cannot take this question with this model, and why: no eyes, or too short a context."""


def ask_all(url: str, questions: Sequence[Question], setting: Setting) -> Iterator[Answer | RefusedError]:
    """The answers in the order of the questions."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http, ThreadPoolExecutor(setting.concurrency) as pool:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        yield from pool.map(lambda question: _ask(http, request_of(question, model, setting)), questions)


def request_of(question: Question, model: str, setting: Setting) -> dict[str, object]:
    """The body of the request, at temperature 0."""
    body: dict[str, object] = {
        "model": model,
        "messages": question.messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "reasoning_effort": setting.effort,
        "stream": setting.is_streamed,
    }
    if question.tools:
        body["tools"] = question.tools
    if question.response_format is not None:
        body["response_format"] = question.response_format
    return body


def _ask(http: httpx.Client, body: Mapping[str, object]) -> Answer | RefusedError:
    try:
        response = http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        raise BackendError(f"the server ended a request without an answer ({error!r}); its log says why") from error
    if response.status_code in _REFUSALS:
        return RefusedError(response.json()["error"]["message"])
    if response.status_code != 200:
        raise BackendError(f"the server answers {response.status_code}: {response.text[:300]}")
    if body["stream"]:
        return read_answer(_joined(response.iter_lines()))
    return read_answer(response.json()["choices"][0]["message"])


def read_answer(message: Mapping[str, Any]) -> Answer:
    """An assistant message as text and calls; arguments that are no JSON stand under the key "" as text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append(Call(function["name"], _arguments(function["arguments"])))
    return Answer((message.get("content") or "").strip(), tuple(calls))


def _arguments(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {"": text}
    return value if isinstance(value, dict) else {"": text}


def _joined(lines: Iterable[str]) -> dict[str, Any]:
    """The message that the deltas of a stream add up to."""
    content = ""
    calls: dict[int, dict[str, dict[str, str]]] = {}
    for line in lines:
        if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise BackendError(f"the server ended a stream with {event['error'].get('message')}")
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                function = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})["function"]
                for key in function:
                    function[key] += piece["function"].get(key) or ""
    return {"content": content, "tool_calls": [calls[index] for index in sorted(calls)]}
