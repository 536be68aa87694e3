"""The three ways to ask for thinking, and what wins."""

import msgspec
import pytest

from perilune.server.openai.schema import ChatRequest
from perilune.server.openai.thinking import ThinkingMode, thinking_mode


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, "max")),
        ({"reasoning_effort": None}, (True, "max")),
        ({"reasoning_effort": "low"}, (True, "low")),
        ({"reasoning_effort": "medium"}, (True, "high")),
        ({"reasoning_effort": "high"}, (True, "high")),
        ({"reasoning_effort": "xhigh"}, (True, "max")),
        ({"reasoning_effort": "minimal"}, (True, "low")),
        ({"reasoning_effort": "none"}, (False, "max")),
        ({"thinking": {"type": "enabled"}}, (True, "max")),
        ({"thinking": {"type": "disabled"}}, (False, "max")),
        ({"thinking": {"type": "disabled", "keep": "all"}, "reasoning_effort": "low"}, (False, "low")),
        ({"thinking": {"effort": "low", "keep": "all"}, "reasoning_effort": "high"}, (True, "low")),
        ({"chat_template_kwargs": {"thinking": False}}, (False, "max")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, (False, "max")),
        ({"chat_template_kwargs": {"thinking": True, "thinking_effort": "low"}}, (True, "low")),
        ({"chat_template_kwargs": {"thinking_effort": "low"}, "reasoning_effort": "high"}, (True, "low")),
        ({"chat_template_kwargs": {"preserve_thinking": True}}, (True, "max")),
    ],
)
def test_thinking_is_on_at_full_effort_unless_the_request_says_otherwise(fields, expected):
    request = msgspec.convert({"model": "m", "messages": [], **fields}, ChatRequest)
    assert thinking_mode(request) == ThinkingMode(*expected)


def test_the_effort_reaches_the_prompt(server, tokenizer):
    server.chat(reasoning_effort="low")
    server.chat(reasoning_effort="none")
    on, off = (tokenizer.decode(request.prompt_token_ids) for request in server.engine.requests)
    assert "`thinking_effort=low`" in on
    assert on.endswith("<|open|>think<|sep|>")
    assert "thinking_effort" not in off
    assert off.endswith("<|open|>response<|sep|>")
