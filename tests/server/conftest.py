"""A real server on a loopback port in front of an engine that replays what a test wants it to say."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from perilune.config.media import MediaConfig
from perilune.engine.client import ModelInfo
from perilune.engine.fake import FakeEngine
from perilune.engine.request import GenerateRequest
from perilune.server.app import create_app
from perilune.server.settings import ServerSettings
from perilune.text.tokenizer import Tokenizer

WORDS = ("message", "think", "response", " role", '="', "user", "system", "assistant", "hello", " world", "你好", "🌙")
MODEL_NAME = "moon"
MAX_MODEL_LEN = 512
DEADLINE_S = 20.0

THOUGHT = "hm🌙<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    ranks = {bytes([value]): value for value in range(256)}
    for word in WORDS:
        raw = word.encode()
        for end in range(2, len(raw) + 1):
            ranks.setdefault(raw[:end], len(ranks))
    return Tokenizer.from_ranks(ranks)


@dataclass
class Running:
    """A server under test: what it was asked is in `engine.requests`."""

    url: str
    engine: FakeEngine
    http: httpx.Client
    script: Callable[[GenerateRequest], Sequence[Any]]
    app: Any
    loop: asyncio.AbstractEventLoop

    def call_in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def chat(self, content: str = "hello", **fields: Any) -> httpx.Response:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": prompt, **fields})

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: self.engine.stats().num_running == 0)


Serve = Callable[..., Running]


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Serve]:
    """Start servers; `says` is the text the engine answers with, control tokens by name, or a script."""
    yield from _servers(tokenizer)


@pytest.fixture(scope="module")
def serve_for_module(tokenizer: Tokenizer) -> Iterator[Serve]:
    """Start servers that serve all tests of a module."""
    yield from _servers(tokenizer)


def _servers(tokenizer: Tokenizer) -> Iterator[Serve]:
    stops: list[Callable[[], None]] = []

    def start(
        says: str | Callable[[GenerateRequest], Sequence[Any]] = "hello" + END,
        *,
        delay_s: float = 0.0,
        settings: ServerSettings | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        media: MediaConfig | None = None,
    ) -> Running:
        token_ids = tokenizer.encode_markup(says) if isinstance(says, str) else []
        script = (lambda _: token_ids) if isinstance(says, str) else says
        eos_token_ids = tokenizer.eos_token_ids
        model = ModelInfo(MODEL_NAME, max_model_len, tokenizer.vocab_size, eos_token_ids, 1_700_000_000, media)
        engine = FakeEngine(model, lambda request: running.script(request), delay_s=delay_s)
        app = create_app(engine, tokenizer, settings or ServerSettings())
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        loops: list[asyncio.AbstractEventLoop] = []

        async def run() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        while not server.started:
            time.sleep(0.002)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        running = Running(url, engine, httpx.Client(base_url=url, timeout=DEADLINE_S), script, app, loops[0])

        def stop() -> None:
            running.http.close()
            server.should_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

        stops.append(stop)
        return running

    yield start
    for stop in stops:
        stop()


@pytest.fixture
def server(serve: Serve) -> Running:
    """A server whose model says hello, without thinking."""
    return serve()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of every event of a stream, which must be well formed and end with [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.content.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    assert all(frame.startswith(b"data: ") for frame in frames[:-1])
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-2]]


def joined(chunks: Sequence[dict[str, Any]], field: str, index: int = 0) -> str:
    """All text that the deltas of one choice carry in `field`."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(field, "") for choice in choices)
