"""The routes, and the life of the server around them."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from perilune.engine.client import EngineClient
from perilune.errors import RequestError
from perilune.server.anthropic.schema import CountTokensRequest, MessagesRequest
from perilune.server.documentation import describe_bodies, json_body
from perilune.server.errors import install_error_handlers
from perilune.server.generate import anthropic_routes, openai_routes
from perilune.server.generation import Dispatcher
from perilune.server.metrics import EngineCollector
from perilune.server.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from perilune.server.openai.tokenize import describe, tokenize
from perilune.server.openai.validate import check_length, check_model, check_token_ids, decode_body
from perilune.server.operations.debug import debug_routes
from perilune.server.operations.request_log import RequestLog
from perilune.server.reading.body import Bodies, ReadingPools, json_response
from perilune.server.reading.pictures import PictureDecoder
from perilune.server.responses.schema import ResponsesRequest
from perilune.server.settings import ServerSettings
from perilune.text.tokenizer import Tokenizer

BODIES = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
ENGINE_STOP_TIMEOUT_S = 5.0


def create_app(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """The application; it starts `client` when it starts and stops it when it ends.

    `app.state.dispatcher` can end the answers in progress, for a shutdown that must not wait for them.
    """
    dispatcher = Dispatcher(client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(client.start)
        app.state.reading_pools = ReadingPools()
        app.state.pictures = PictureDecoder(settings.max_picture_bytes)
        yield
        app.state.reading_pools.close()
        app.state.pictures.close()
        await asyncio.to_thread(client.stop, ENGINE_STOP_TIMEOUT_S)

    app = FastAPI(title="perilune", lifespan=lifespan)
    app.state.dispatcher = dispatcher
    install_error_handlers(app)
    app.include_router(_open_routes(client))
    guarded = [Depends(_key_check(settings.api_key))] if settings.api_key is not None else []
    app.include_router(openai_routes(client, tokenizer, settings, dispatcher), dependencies=guarded)
    app.include_router(anthropic_routes(client, tokenizer, settings, dispatcher), dependencies=guarded)
    app.include_router(_model_routes(client), dependencies=guarded)
    app.include_router(_tokenizer_routes(client, tokenizer, settings), dependencies=guarded)
    if settings.has_debug_routes:
        app.include_router(debug_routes(client), dependencies=guarded)
    describe_bodies(app, BODIES)
    app.add_middleware(RequestLog)
    return app


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
        return json_response({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name, client.model)
        return json_response(card())

    return router


def _tokenizer_routes(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=json_body(TokenizeRequest, TokenizeChatRequest))
    async def tokenize_text_or_chat(request: Request) -> Response:
        def encode(body: bytes) -> dict[str, Any]:
            return tokenize(body, client.model, tokenizer, settings)

        return json_response(await Bodies(settings).read(request, encode))

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        def decode(body: bytes) -> dict[str, Any]:
            asked = decode_body(body, DetokenizeRequest)
            check_model(asked.model, client.model)
            check_length(asked.tokens, client.model.max_model_len, "tokens")
            check_token_ids(asked.tokens, tokenizer.vocab_size, "tokens")
            return {"prompt": tokenizer.decode(asked.tokens)}

        return json_response(await Bodies(settings).read(request, decode))

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return json_response(describe(tokenizer, client.model))

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
        return json_response({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _key_check(api_key: str) -> Callable[[Request], Awaitable[None]]:
    allowed = (("authorization", f"Bearer {api_key}".encode()), ("x-api-key", api_key.encode()))

    async def check_key(request: Request) -> None:
        given = [(request.headers.get(name, "").encode("latin-1"), value) for name, value in allowed]
        if not any(hmac.compare_digest(*pair) for pair in given):
            raise RequestError(
                "this server needs its API key in the header Authorization: Bearer KEY, or x-api-key: KEY",
                status=401,
                code="invalid_api_key",
            )

    return check_key
