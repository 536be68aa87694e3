"""How a load reaches a server: streamed completions of token ids over HTTP, and what is asked before the first one."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from perilune.errors import ConfigError

CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Increment:
    """What one event of an answer brings: new token ids, and with the last event the counts of the prompt."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0


class RequestFailure(Exception):
    """A request that was not answered to its end; `kind` is short and the same for failures of one cause."""

    def __init__(self, kind: str):
        super().__init__(kind)
        self.kind = kind


class Transport(Protocol):
    """Sends one request; the increments come as the server sends them. Raises RequestFailure."""

    def complete(self, token_ids: Sequence[int], max_tokens: int) -> AsyncGenerator[Increment, None]: ...


@dataclass(frozen=True)
class ServedModel:
    """What the server says of its model; a length that it does not tell is None."""

    name: str
    max_model_len: int | None


class HttpTransport:
    """The completions API of a server at `url`, greedy and past the end of the answer, so that lengths are as asked.

    `return_token_ids` (perilune, vLLM) makes every token an event and lets a conversation go on with the exact answer.
    """

    def __init__(self, url: str, api_key: str | None, *, max_connections: int):
        base = url if "://" in url else f"http://{url}"
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._http = httpx.AsyncClient(
                base_url=base.rstrip("/").removesuffix("/v1"),
                headers=headers,
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"--url is {url!r}: {error}; give one such as http://127.0.0.1:8000") from error
        self._url = url
        self._model = ""

    async def close(self) -> None:
        await self._http.aclose()

    async def connect(self, model: str | None) -> ServedModel:
        """Ask which models there are and take the first, or the one named; ConfigError where that fails."""
        cards = (await self._ask("GET", "/v1/models")).get("data") or []
        by_name = {str(card.get("id")): card for card in cards if isinstance(card, dict)}
        name = model or next(iter(by_name), "")
        if name not in by_name:
            raise ConfigError(f"{self._url} serves {', '.join(by_name) or 'no model'}, not {name!r}; name one of them")
        self._model = name
        return ServedModel(name, by_name[name].get("max_model_len"))

    async def encode(self, text: str) -> list[int]:
        """The token ids of a text, by the server's tokenizer."""
        answer = await self._ask("POST", "/tokenize", {"model": self._model, "prompt": text})
        return [int(token_id) for token_id in answer.get("tokens") or ()]

    async def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
            answer = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{self._url}{path} does not answer ({error}); is the server running?") from error
        if response.status_code != 200 or not isinstance(answer, dict):
            raise ConfigError(f"{self._url}{path} answers {response.status_code}: {response.text[:300]}")
        return answer

    async def complete(self, token_ids: Sequence[int], max_tokens: int) -> AsyncGenerator[Increment, None]:
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise RequestFailure(_kind(response.status_code, await response.aread()))
                async with aclosing(_increments(response)) as increments:
                    async for increment in increments:
                        yield increment
        except httpx.HTTPError as error:
            raise RequestFailure(type(error).__name__) from error


async def _increments(response: httpx.Response) -> AsyncGenerator[Increment, None]:
    async for event in _events(response):
        if "error" in event:
            raise RequestFailure(f"stream {event['error'].get('code') or event['error'].get('type')}")
        usage = event.get("usage")
        ids = tuple(i for choice in event.get("choices", ()) for i in choice.get("token_ids") or ())
        if usage is None:
            yield Increment(ids)
        else:
            details = usage.get("prompt_tokens_details") or {}
            yield Increment(ids, int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            try:
                yield json.loads(data)
            except ValueError as error:
                raise RequestFailure("malformed event") from error


def _kind(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{status} {error.get('code') or error.get('type')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return str(status)
