"""The routes that generate: one for each dialect, all on the same plans."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from perilune.engine.client import EngineClient
from perilune.server.anthropic.answer import answer_message, stream_message
from perilune.server.anthropic.request import read_request as read_messages
from perilune.server.anthropic.schema import CountTokensRequest, MessagesRequest
from perilune.server.choice import Choice, usage_headers
from perilune.server.dialect.places import Places
from perilune.server.documentation import json_body
from perilune.server.generation import Dispatcher, run_while_connected
from perilune.server.openai.chat import ChatPlan, answer_chat, plan_chat, stream_chat
from perilune.server.openai.completions import CompletionPlan, answer_completion, plan_completion, stream_completion
from perilune.server.openai.prompt import chat_prompt
from perilune.server.openai.schema import ChatRequest, CompletionRequest
from perilune.server.openai.validate import check_model, decode_body
from perilune.server.reading.body import Bodies, json_response
from perilune.server.reading.pictures import PictureDecoder
from perilune.server.responses.answer import answer_response, stream_response
from perilune.server.responses.request import Echo
from perilune.server.responses.request import read_request as read_responses
from perilune.server.responses.schema import ResponsesRequest
from perilune.server.settings import ServerSettings
from perilune.server.stream import EventStream
from perilune.text.prompt.room import Room
from perilune.text.tokenizer import Tokenizer

ANTHROPIC_PREFIXES = ("/v1", "/anthropic/v1")


async def _decoded(request: Request, plan: ChatPlan, places: Places) -> ChatPlan:
    """The plan with its pictures decoded, which nobody does who has none."""
    if not plan.pictures:
        return plan
    decoder: PictureDecoder = request.app.state.pictures
    with places.translated():
        return plan.with_images(await decoder.load(plan.pictures))


async def _send(
    request: Request,
    is_stream: bool,
    choices: Sequence[Choice],
    n: int,
    whole: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
    frames: Callable[[], AsyncGenerator[bytes, None]],
    places: Places | None = None,
) -> Response:
    """`places` say what the client called the fields that an error of the engine may name."""
    places = places or Places()
    if is_stream:
        return EventStream(_translated(frames(), places), lambda: usage_headers(choices, n))
    with places.translated():
        answer = await run_while_connected(request.receive, whole())
    return json_response(answer, usage_headers(choices, n))


async def _translated(frames: AsyncGenerator[bytes, None], places: Places) -> AsyncGenerator[bytes, None]:
    with places.translated():
        async with aclosing(frames):
            async for data in frames:
                yield data


def openai_routes(
    client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings, dispatcher: Dispatcher
) -> APIRouter:
    """Chat completions, completions and responses."""
    router = APIRouter()
    bodies = Bodies(settings)

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        def read(body: bytes) -> ChatPlan:
            return plan_chat(decode_body(body, ChatRequest), client.model, tokenizer, settings)

        plan = await _decoded(request, await bodies.read(request, read), Places())
        choices = plan.choices(tokenizer)
        return await _send(
            request,
            plan.is_stream,
            choices,
            len(choices),
            lambda: answer_chat(plan, choices, dispatcher, tokenizer),
            lambda: stream_chat(plan, choices, dispatcher, tokenizer),
        )

    @router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        def read(body: bytes) -> CompletionPlan:
            return plan_completion(decode_body(body, CompletionRequest), client.model, tokenizer, settings)

        plan = await bodies.read(request, read)
        texts = plan.texts(tokenizer)
        return await _send(
            request,
            plan.is_stream,
            [text.choice for text in texts],
            plan.n,
            lambda: answer_completion(plan, texts, dispatcher),
            lambda: stream_completion(plan, texts, dispatcher),
        )

    @router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        def read(body: bytes) -> tuple[ChatPlan, Echo, Places]:
            chat, echo, places = read_responses(decode_body(body, ResponsesRequest), settings.max_messages)
            with places.translated():
                return plan_chat(chat, client.model, tokenizer, settings), echo, places

        plan, echo, places = await bodies.read(request, read)
        plan = await _decoded(request, plan, places)
        choices = plan.choices(tokenizer)
        return await _send(
            request,
            plan.is_stream,
            choices,
            1,
            lambda: answer_response(plan, echo, choices[0], dispatcher, tokenizer),
            lambda: stream_response(plan, echo, choices[0], dispatcher, tokenizer),
            places,
        )

    return router


def anthropic_routes(
    client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings, dispatcher: Dispatcher
) -> APIRouter:
    """Messages, and the count of their tokens."""
    router = APIRouter()
    bodies = Bodies(settings)

    async def messages(request: Request) -> Response:
        def read(body: bytes) -> tuple[ChatPlan, Places]:
            chat, places = read_messages(decode_body(body, MessagesRequest), settings.max_messages)
            with places.translated():
                return plan_chat(chat, client.model, tokenizer, settings), places

        plan, places = await bodies.read(request, read)
        plan = await _decoded(request, plan, places)
        choices = plan.choices(tokenizer)
        return await _send(
            request,
            plan.is_stream,
            choices,
            1,
            lambda: answer_message(plan, choices[0], dispatcher),
            lambda: stream_message(plan, choices[0], dispatcher),
            places,
        )

    async def count_tokens(request: Request) -> Response:
        def count(body: bytes) -> int:
            chat, places = read_messages(decode_body(body, CountTokensRequest), settings.max_messages)
            with places.translated():
                check_model(chat.model, client.model)
                room = Room(client.model.max_model_len, tokenizer, counts_only=True)
                return len(chat_prompt(chat, tokenizer, settings, client.model.media, room).token_ids)

        return json_response({"input_tokens": await bodies.read(request, count)})

    for prefix in ANTHROPIC_PREFIXES:
        for path, route, kind in (
            ("/messages", messages, MessagesRequest),
            ("/messages/count_tokens", count_tokens, CountTokensRequest),
        ):
            router.add_api_route(prefix + path, route, methods=["POST"], openapi_extra=json_body(kind))
    return router
