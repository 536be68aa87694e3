"""The routes, and the life of the server around them."""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from perilune.engine.client import EngineClient
from perilune.errors import RequestError
from perilune.server.documentation import describe_bodies, json_body
from perilune.server.errors import install_error_handlers
from perilune.server.generation import Dispatcher, run_while_connected
from perilune.server.metrics import EngineCollector
from perilune.server.openai.chat import ChatPlan, answer_chat, plan_chat, stream_chat
from perilune.server.openai.completions import CompletionPlan, answer_completion, plan_completion, stream_completion
from perilune.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from perilune.server.openai.validate import check_model, check_token_ids, decode_body
from perilune.server.settings import ServerSettings
from perilune.server.stream import EventStream
from perilune.server.tokenize import tokenize
from perilune.text.tokenizer import Tokenizer

T = TypeVar("T")

# a body larger than this is parsed and tokenized on a thread, so that running streams are not held up
INLINE_BODY_BYTES = 16 * 1024
ENGINE_STOP_TIMEOUT_S = 5.0
# pictures are fetched and decoded on so many threads, and a body that may hold one is read there; JSON may spell the
# word with escapes
IMAGE_THREADS = 4
MAY_HOLD_IMAGES = re.compile(rb"image|\\u")


def create_app(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """The application; it starts `client` when it starts and stops it when it ends.

    `app.state.dispatcher` can end the answers in progress, for a shutdown that must not wait for them.
    """
    dispatcher = Dispatcher(client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(client.start)
        with ThreadPoolExecutor(IMAGE_THREADS, "perilune-images") as pool:
            app.state.image_pool = pool
            yield
        await asyncio.to_thread(client.stop, ENGINE_STOP_TIMEOUT_S)

    app = FastAPI(title="perilune", lifespan=lifespan)
    app.state.dispatcher = dispatcher
    install_error_handlers(app)
    app.include_router(_open_routes(client))
    guarded = [Depends(_key_check(settings.api_key))] if settings.api_key is not None else []
    app.include_router(_generation_routes(client, tokenizer, settings, dispatcher), dependencies=guarded)
    app.include_router(_model_routes(client), dependencies=guarded)
    app.include_router(_tokenizer_routes(client, tokenizer, settings), dependencies=guarded)
    describe_bodies(app, (ChatRequest, CompletionRequest, TokenizeRequest, TokenizeChatRequest, DetokenizeRequest))
    return app


def _generation_routes(
    client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings, dispatcher: Dispatcher
) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        def plan(body: bytes) -> ChatPlan:
            return plan_chat(decode_body(body, ChatRequest), client.model, tokenizer, settings)

        chat = await _parse(request, settings, plan)
        if chat.is_stream:
            return EventStream(stream_chat(chat, dispatcher, tokenizer))
        return _json(await run_while_connected(request.receive, answer_chat(chat, dispatcher, tokenizer)))

    @router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        def plan(body: bytes) -> CompletionPlan:
            return plan_completion(decode_body(body, CompletionRequest), client.model, tokenizer, settings)

        completion = await _parse(request, settings, plan)
        if completion.is_stream:
            return EventStream(stream_completion(completion, dispatcher, tokenizer))
        return _json(await run_while_connected(request.receive, answer_completion(completion, dispatcher, tokenizer)))

    return router


def _model_routes(client: EngineClient) -> APIRouter:
    router = APIRouter()

    def card() -> dict[str, Any]:
        model = client.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "perilune",
            "max_model_len": model.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name, client.model)
        return _json(card())

    return router


def _tokenizer_routes(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=json_body(TokenizeRequest, TokenizeChatRequest))
    async def tokenize_text_or_chat(request: Request) -> Response:
        def encode(body: bytes) -> dict[str, Any]:
            return tokenize(body, client.model, tokenizer, settings)

        return _json(await _parse(request, settings, encode))

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        def decode(body: bytes) -> dict[str, Any]:
            asked = decode_body(body, DetokenizeRequest)
            check_model(asked.model, client.model)
            check_token_ids(asked.tokens, tokenizer.vocab_size, "tokens")
            return {"prompt": tokenizer.decode(asked.tokens)}

        return _json(await _parse(request, settings, decode))

    return router


def _open_routes(client: EngineClient) -> APIRouter:
    """What a supervisor asks; needs no key."""
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(EngineCollector(client.stats, client.model.name))

    @router.get("/health")
    async def health() -> Response:
        if (reason := client.check_health()) is not None:
            raise RequestError(reason, status=503, code="engine_unavailable")
        return _json({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _key_check(api_key: str) -> Callable[[Request], Awaitable[None]]:
    expected = f"Bearer {api_key}".encode()

    async def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, expected):
            raise RequestError(
                "this server needs its API key in the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    return check_key


async def _parse(request: Request, settings: ServerSettings, read: Callable[[bytes], T]) -> T:
    """The body of `request` as `read` understands it."""
    body = await _read_body(request, settings.max_body_bytes)
    if MAY_HOLD_IMAGES.search(body):
        return await asyncio.get_running_loop().run_in_executor(request.app.state.image_pool, read, body)
    if len(body) <= INLINE_BODY_BYTES:
        return read(body)
    return await asyncio.to_thread(read, body)


async def _read_body(request: Request, limit: int) -> bytes:
    """The body, of which no more than `limit` bytes are ever held."""
    announced = request.headers.get("content-length", "")
    body = bytearray()
    is_too_large = announced.isdigit() and int(announced) > limit
    if not is_too_large:
        async for part in request.stream():
            body += part
            if is_too_large := len(body) > limit:
                break
    if is_too_large:
        raise RequestError(
            f"the body is larger than {limit} bytes, which is the limit of this server",
            status=413,
            code="request_too_large",
        )
    return bytes(body)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
