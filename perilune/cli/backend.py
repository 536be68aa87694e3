"""Where the answers of `chat` and `generate` come from: an engine in this process, or a server at a URL."""

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from perilune.errors import ConfigError, RequestError
from perilune.sampling.params import SamplingParams
from perilune.text.channels import Channel

if TYPE_CHECKING:
    from perilune.config.engine import EngineConfig
    from perilune.engine.client import InProcessClient
    from perilune.engine.host.process import ProcessClient
    from perilune.text.images.picture import ImageInput
    from perilune.text.tokenizer import Tokenizer

NO_THINKING = "none"
DEMO_NAME = "perilune-demo"
CONNECT_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0

Turn = Mapping[str, object]
Show = Callable[[Channel, str], None]


class Backend(Protocol):
    """Answers conversations; `show` gets the text as it comes. Gives the finish reason."""

    def answer(self, messages: Sequence[Turn], effort: str, params: SamplingParams, show: Show) -> str: ...

    def close(self) -> None: ...


def start_engine(
    checkpoint: Path | None,
    config: "EngineConfig",
    *,
    name: str | None = None,
    num_threads: int | None = None,
    step_timeout_s: float | None = None,
) -> "tuple[InProcessClient, Tokenizer]":
    """Load a checkpoint (None: the bundled demo) behind a client that is not started yet."""
    from perilune.config.engine import DEMO_CHECKPOINT
    from perilune.engine.build import build_engine
    from perilune.engine.client import InProcessClient, ModelInfo
    from perilune.engine.host.loop import DEFAULT_STEP_TIMEOUT_S
    from perilune.ops.threads import set_num_threads

    if num_threads is not None:
        set_num_threads(num_threads)
    core = build_engine(checkpoint or DEMO_CHECKPOINT, config)
    assert core.tokenizer is not None
    model = ModelInfo(
        name=name or _model_name(checkpoint),
        max_model_len=core.limits.max_model_len,
        vocab_size=core.limits.vocab_size,
        eos_token_ids=core.limits.eos_token_ids,
        created=int(time.time()),
        media=core.limits.media,
    )
    limit_s = DEFAULT_STEP_TIMEOUT_S if step_timeout_s is None else step_timeout_s
    return InProcessClient(core, model, step_timeout_s=limit_s), core.tokenizer


def start_engine_process(
    checkpoint: Path | None,
    config: "EngineConfig",
    *,
    name: str | None,
    num_threads: int | None,
    step_timeout_s: float,
    prepare: Callable[[], None],
) -> "tuple[ProcessClient, Tokenizer]":
    """The same in a process of its own, which calls `prepare` first."""
    from perilune.config.engine import DEMO_CHECKPOINT
    from perilune.engine.host.process import ProcessClient
    from perilune.engine.host.wire import EngineSpec
    from perilune.text.tokenizer import Tokenizer

    directory = checkpoint or DEMO_CHECKPOINT
    client = ProcessClient(
        EngineSpec(directory, config, num_threads, step_timeout_s, prepare), name or _model_name(checkpoint)
    )
    return client, Tokenizer.load(directory)


def _model_name(checkpoint: Path | None) -> str:
    return checkpoint.resolve().name if checkpoint else DEMO_NAME


class LocalBackend:
    """An engine in a thread of this process. Ctrl-C while it answers aborts the request."""

    def __init__(self, checkpoint: Path | None, config: "EngineConfig", num_threads: int | None):
        self._client, self._tokenizer = start_engine(checkpoint, config, num_threads=num_threads)
        self._client.start()
        self._ids = itertools.count()

    def answer(self, messages: Sequence[Turn], effort: str, params: SamplingParams, show: Show) -> str:
        from perilune.text.encoding import encode_chat
        from perilune.text.images.reader import ImageReader

        is_thinking, media = effort != NO_THINKING, self._client.model.media
        prompt = encode_chat(
            messages,
            self._tokenizer,
            thinking=is_thinking,
            effort=effort if is_thinking else "max",
            images=None if media is None else ImageReader(media),
        )
        images = prompt.load_images()
        return asyncio.run(self._run(prompt.token_ids, prompt.start_channel, params, show, images))

    def continue_text(self, prompt: str, params: SamplingParams, show: Show) -> str:
        """Continue a raw prompt, in which names of control tokens stand for those tokens."""
        token_ids = tuple(self._tokenizer.encode_markup(prompt))
        return asyncio.run(self._run(token_ids, Channel.TEXT, params, show))

    def close(self) -> None:
        self._client.stop(STOP_TIMEOUT_S)

    async def _run(
        self,
        token_ids: tuple[int, ...],
        start: Channel,
        params: SamplingParams,
        show: Show,
        images: "tuple[ImageInput, ...]" = (),
    ) -> str:
        from perilune.engine.request import GenerateRequest
        from perilune.server.choice import Choice

        request = GenerateRequest(f"cli-{next(self._ids)}", token_ids, params, start, images)
        choice = Choice(request, self._tokenizer)
        async with aclosing(self._client.generate(request)) as outputs:
            async for output in outputs:
                for piece in choice.push(output):
                    show(piece.channel, piece.text)
                if output.error is not None:
                    raise RequestError(output.error, status=500)
        return choice.finish_reason or "abort"


def user_content(text: str, images: Sequence[Path]) -> str | list[dict[str, object]]:
    """The content of a user's message: the pictures, then the text. ConfigError for a file that cannot be read."""
    parts: list[dict[str, object]] = []
    for file in images:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"--image {file} cannot be read: {error.strerror}; give the file of a picture") from error
        # the picture's kind is read off its bytes
        url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": text}] if parts else text


@dataclass(frozen=True)
class _Address:
    is_https: bool
    host: str
    port: int | None
    path: str


class UrlBackend:
    """A server with the OpenAI API, such as `perilune serve`. Ctrl-C while it answers closes the connection."""

    def __init__(self, url: str, model: str | None, api_key: str | None):
        self._address = _read_url(url)
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model or self._first_model()

    def answer(self, messages: Sequence[Turn], effort: str, params: SamplingParams, show: Show) -> str:
        body = {
            "model": self._model,
            "messages": list(messages),
            "stream": True,
            "reasoning_effort": effort,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": params.max_tokens,
            "seed": params.seed,
        }
        finish_reason = "abort"
        given = {name: value for name, value in body.items() if value is not None}
        with closing(self._events("POST", "/chat/completions", json.dumps(given).encode())) as events:
            for event in events:
                try:
                    finish_reason = _show_event(event, show) or finish_reason
                except (AttributeError, LookupError, TypeError) as error:
                    message = f"{self._url} sends what no chat answer holds: {str(event)[:200]}"
                    raise RequestError(message, status=502) from error
        return finish_reason

    def close(self) -> None:
        """Nothing is kept open between answers."""

    def _first_model(self) -> str:
        models = list(self._events("GET", "/models", None))
        try:
            return str(models[0]["data"][0]["id"])
        except (IndexError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._url} lists no model; name one with --model") from error

    def _events(self, method: str, path: str, body: bytes | None) -> Generator[dict[str, Any], None, None]:
        """The JSON objects of an answer: one, or those of its events as they come."""
        address = self._address
        kind = HTTPSConnection if address.is_https else HTTPConnection
        connection = kind(address.host, address.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            # a long prompt may take its time until the first token
            connection.sock.settimeout(None)
            connection.request(method, address.path + path, body, self._headers)
            yield from _read_events(connection.getresponse())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{self._url} answers with something that is not JSON: {error}", status=502) from error
        except (OSError, HTTPException, ValueError) as error:  # the last is for a host or a key that cannot be sent
            raise RequestError(f"{self._url} does not answer ({error}); is the server running?", status=503) from error
        finally:
            connection.close()


def _show_event(event: Mapping[str, Any], show: Show) -> str | None:
    """Show what an event adds; gives the finish reason if it has one."""
    if "error" in event:
        raise RequestError(str(event["error"].get("message")), status=500)
    finish_reason = None
    for choice in event.get("choices", ()):
        for channel, field in ((Channel.REASONING, "reasoning_content"), (Channel.CONTENT, "content")):
            if text := choice["delta"].get(field):
                show(channel, text)
        finish_reason = choice["finish_reason"]
    return finish_reason


def _read_events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    if response.status != 200:
        raise _refusal(response)
    if response.headers.get_content_type() != "text/event-stream":
        yield json.loads(response.read())
        return
    for line in response:
        name, _, data = line.strip().partition(b":")
        if name == b"data" and data.strip() != b"[DONE]":
            yield json.loads(data)


def _refusal(response: HTTPResponse) -> RequestError:
    text = response.read().decode("utf-8", "replace")
    try:
        text = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = text[:200]
    return RequestError(f"the server refuses with status {response.status}: {text}", status=response.status)


def _read_url(url: str) -> _Address:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url is {url!r}: {error}; give one such as http://127.0.0.1:8000") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url is {url!r}; give one such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/")
    return _Address(parts.scheme == "https", parts.hostname, port, path if path.endswith("/v1") else path + "/v1")
