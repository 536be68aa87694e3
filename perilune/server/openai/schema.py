"""The JSON that clients may send, as types. Ranges and meaning are checked in `validate`.

A field typed `Any` is known by name only, to say that it is not supported rather than that it does not exist.
"""

from typing import Any, Protocol

import msgspec


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_internal_content: bool | None = None
    continuous_usage_stats: bool | None = None
    # no effect: nothing here is worth hiding by padding
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of the fields says what the answer must be; `json` is a schema and `grammar` is in Lark."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every kind of generation accepts."""

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = None
    timeout: float | None = None
    # prefixes are shared only among requests of equal salts
    cache_salt: str | None = None
    # no effect
    user: str | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str | None = None
    effort: str | None = None
    keep: str | None = None


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    thinking: bool | None = None
    enable_thinking: bool | None = None
    thinking_effort: str | None = None
    preserve_thinking: bool | None = None


class AsksForChat(Protocol):
    """What decides the prompt of a chat, in whichever request it stands."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    response_format: dict[str, Any] | None
    reasoning_effort: str | None
    thinking: Thinking | None
    chat_template_kwargs: TemplateOptions | None


class ChatRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    # what messages, tools and formats may hold is the business of text/
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    # no effect
    metadata: dict[str, str] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None


class CompletionRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = None
    best_of: int | None = None
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    prompt: str
    return_token_strs: bool | None = None
    # no effect: the model has no tokens that would stand before or after every text
    add_special_tokens: bool | None = None


class TokenizeChatRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


# the type at each place where an object may stand, to name what is allowed there
NESTED: dict[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "structured_outputs": StructuredOutputs,
    "thinking": Thinking,
    "chat_template_kwargs": TemplateOptions,
}

# values that ask for nothing, and so may be sent although the field is not supported
NOTHING: tuple[object, ...] = (None, [], {}, "")

UNSUPPORTED_IN_CHAT = {
    "functions": "functions are not supported; they are the deprecated form of tools",
    "function_call": "function_call is not supported; it is the deprecated form of tool_choice",
    "audio": "audio output is not supported",
    "verbosity": "verbosity is not supported; ask for a short or long answer in a message",
    "web_search_options": "web search is not supported",
    "moderation": "moderation is not supported",
}
