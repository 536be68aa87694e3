"""The JSON of the OpenAI Responses API, as types. What lies inside items and tools is read in `request`."""

from typing import Any

import msgspec


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    # no effect
    store: bool | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


UNSUPPORTED = {
    "previous_response_id": "previous_response_id is not supported: nothing is stored here; send the whole "
    "conversation in input",
    "conversation": "conversation is not supported: nothing is stored here; send the whole conversation in input",
    "prompt": "prompt templates are not supported; send their text in input",
    "background": "background answers are not supported; use stream",
    "context_management": "context_management is not supported; send only what the model is to see",
    "moderation": "moderation is not supported",
}
