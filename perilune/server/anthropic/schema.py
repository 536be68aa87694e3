"""The JSON of the Anthropic Messages API, as types. What lies inside messages and tools is read in `request`."""

from typing import Any

import msgspec


class Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What decides the prompt."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None
    # no effect: caching is automatic, and the whole conversation stays in the prompt
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class CountTokensRequest(Asked, forbid_unknown_fields=True, kw_only=True):
    pass


class MessagesRequest(Asked, forbid_unknown_fields=True, kw_only=True):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    # no effect
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


UNSUPPORTED = {
    "mcp_servers": "mcp_servers are not supported; call such servers from the client, as tools",
    "container": "container is not supported; there is no code execution here",
}
