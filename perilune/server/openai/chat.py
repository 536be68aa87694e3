"""The OpenAI chat completions dialect: a request to engine requests, their outputs to an answer or to frames."""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perilune.engine.client import ModelInfo
from perilune.engine.request import GenerateRequest, ImageInput, RequestOutput, TokenLogprob
from perilune.errors import RequestError
from perilune.sampling.params import MAX_LOGPROBS
from perilune.server.calls import CallIds
from perilune.server.choice import Choice, Piece, token_text, usage
from perilune.server.generation import Dispatcher
from perilune.server.openai.profile import PROFILES, check_profile
from perilune.server.openai.prompt import chat_prompt
from perilune.server.openai.schema import NOTHING, UNSUPPORTED_IN_CHAT, ChatRequest, StreamOptions
from perilune.server.openai.structured import grammar_of_chat
from perilune.server.openai.thinking import thinking_mode
from perilune.server.openai.tools import call_delta, earlier_call_ids, whole_calls
from perilune.server.openai.validate import (
    check_context,
    check_model,
    check_stream_options,
    check_unsupported,
    choice_params,
    num_choices,
    request_timeout,
    sampling_params,
)
from perilune.server.settings import ServerSettings
from perilune.server.stream import DONE, frame
from perilune.text.channels import Channel, collect
from perilune.text.prompt.room import Room
from perilune.text.prompt.segments import PlacedPicture
from perilune.text.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)
DEFAULT_TOP_P = 0.95
FIELD_OF_CHANNEL = {Channel.REASONING: "reasoning_content", Channel.CONTENT: "content", Channel.TEXT: "content"}


@dataclass(frozen=True)
class ChatPlan:
    """A checked chat request: what to run, and how to answer; without `earlier_call_ids` no tool can be called.

    `pictures` must be decoded and shown to it before it runs.
    """

    base: dict[str, Any]
    requests: tuple[GenerateRequest, ...]
    is_stream: bool
    has_usage_frame: bool
    num_top_logprobs: int | None
    earlier_call_ids: tuple[str, ...] | None = None
    shows_token_ids: bool = False
    shows_usage_always: bool = False
    ends_failures: bool = False
    pictures: tuple[PlacedPicture, ...] = ()

    def with_images(self, images: tuple[ImageInput, ...]) -> "ChatPlan":
        """The plan with its pictures decoded."""
        requests = tuple(replace(request, images=images) for request in self.requests)
        return replace(self, requests=requests, pictures=())

    def choices(self, tokenizer: Tokenizer) -> list[Choice]:
        """The answers to come, one for each request."""
        taken = self.earlier_call_ids
        return [Choice(request, tokenizer, None if taken is None else CallIds(taken)) for request in self.requests]


def plan_chat(request: ChatRequest, model: ModelInfo, tokenizer: Tokenizer, settings: ServerSettings) -> ChatPlan:
    """Check a chat request and encode its conversation; RequestError names the field that is wrong."""
    check_model(request.model, model)
    if request.verbosity == "medium":
        # the default of the API, which asks for nothing
        request.verbosity = None
    check_unsupported(request, UNSUPPORTED_IN_CHAT)
    if request.modalities not in (*NOTHING, ["text"]):
        raise RequestError('modalities is not supported except ["text"]', param="modalities", code="unsupported")
    n = num_choices(request, 1, settings.max_choices)
    has_usage_frame = check_stream_options(request)
    max_tokens = _max_tokens(request)
    num_top_logprobs = _num_top_logprobs(request)
    timeout_s = request_timeout(request, settings.request_timeout_s)
    profile = PROFILES[settings.profile]
    check_profile(request, profile, is_thinking=thinking_mode(request).is_on)
    params = sampling_params(
        request,
        max_tokens=profile.default_max_tokens if max_tokens is None else max_tokens,
        logprobs=num_top_logprobs,
        default_top_p=DEFAULT_TOP_P,
    )
    prompt = chat_prompt(request, tokenizer, settings, model.media, Room(model.max_model_len, tokenizer))
    check_context(len(prompt.token_ids), max_tokens, model, "messages")
    grammar = grammar_of_chat(request, prompt, tokenizer)
    # 8 hex digits of the time first, so that ids sort by it
    response_id = f"chatcmpl-{int(time.time()):08x}{secrets.token_hex(8)}"
    requests = tuple(
        GenerateRequest(
            f"{response_id}-{index}",
            prompt.token_ids,
            choice_params(params, index),
            prompt.start_channel,
            grammar=grammar,
            priority=request.priority or 0,
            timeout_s=timeout_s,
            cache_salt=request.cache_salt,
            branch_points=prompt.branch_points,
        )
        for index in range(n)
    )
    base = {"id": response_id, "object": "chat.completion", "created": int(time.time()), "model": model.name}
    call_ids = earlier_call_ids(request.messages) if prompt.tools else None
    options = request.stream_options or StreamOptions()
    return ChatPlan(
        base=base,
        requests=requests,
        pictures=prompt.pictures,
        is_stream=bool(request.stream),
        has_usage_frame=has_usage_frame,
        num_top_logprobs=num_top_logprobs,
        earlier_call_ids=call_ids,
        shows_token_ids=bool(options.include_internal_content),
        shows_usage_always=bool(options.continuous_usage_stats),
        ends_failures=profile.ends_failed_streams,
    )


async def answer_chat(
    plan: ChatPlan, choices: Sequence[Choice], dispatcher: Dispatcher, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Run the plan and give the whole answer."""
    pieces: list[list[Piece]] = [[] for _ in choices]
    async with dispatcher.open(plan.requests) as outputs:
        async for index, output in outputs:
            pieces[index] += choices[index].push(output)
    answers = [
        {
            "index": index,
            "message": _message(plan.requests[index], pieces[index]),
            "logprobs": _logprobs(plan, tokenizer, pieces[index]),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        for index, choice in enumerate(choices)
    ]
    return {**plan.base, "choices": answers, "usage": usage(choices, len(choices))}


async def stream_chat(
    plan: ChatPlan, choices: Sequence[Choice], dispatcher: Dispatcher, tokenizer: Tokenizer
) -> AsyncGenerator[bytes, None]:
    """Run the plan and give the answer frame by frame; the first frame comes with the first output."""
    streams = [_ChoiceStream(plan, index, choice, tokenizer) for index, choice in enumerate(choices)]
    base = {**plan.base, "object": "chat.completion.chunk"}
    try:
        async with dispatcher.open(plan.requests) as outputs:
            async for index, output in outputs:
                for shown in streams[index].push(output):
                    more = {"usage": usage(choices, len(choices))} if plan.shows_usage_always else {}
                    yield frame({**base, "choices": [shown], **more})
    except Exception as error:
        if not plan.ends_failures or not any(stream.has_begun for stream in streams):
            raise
        LOG.warning("a stream ends abnormally", exc_info=error)
        for stream in streams:
            for shown in stream.fail(_abnormal_reason(error)):
                yield frame({**base, "choices": [shown]})
    if plan.has_usage_frame:
        yield frame({**base, "choices": [], "usage": usage(choices, len(choices))})
    yield DONE


class _ChoiceStream:
    """One choice as it stands in the frames of a stream."""

    def __init__(self, plan: ChatPlan, index: int, choice: Choice, tokenizer: Tokenizer):
        self._plan = plan
        self._index = index
        self._choice = choice
        self._tokenizer = tokenizer
        self.has_begun = False
        self._is_thinking = plan.requests[index].start_channel is Channel.REASONING

    def push(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """What one output adds, one kind of increment at a time, and at last the end with the usage."""
        yield from self._begin()
        for piece in self._choice.push(output):
            yield from self._increment(piece)
        if self._choice.finish_reason is not None:
            yield self._end(self._choice.finish_reason)

    def fail(self, reason: str) -> Iterator[dict[str, Any]]:
        """The end of a choice that had not ended, for an abnormal reason."""
        if self._choice.finish_reason is None:
            yield from self._begin()
            yield self._end(reason)

    def _begin(self) -> Iterator[dict[str, Any]]:
        if not self.has_begun:
            self.has_begun = True
            yield self._shown({"role": "assistant", "content": ""})

    def _end(self, finish_reason: str) -> dict[str, Any]:
        return {
            **self._shown({}),
            "finish_reason": finish_reason,
            "stop_reason": self._choice.stop_reason,
            "usage": usage([self._choice], 1),
        }

    def _increment(self, piece: Piece) -> Iterator[dict[str, Any]]:
        marker_ids = piece.marker_ids
        if self._is_thinking and piece.channel is not Channel.REASONING:
            self._is_thinking = False
            yield self._shown(self._with_ids({"reasoning_content": ""}, marker_ids))
            marker_ids = ()
        delta = self._with_ids(_delta(piece), (*marker_ids, *piece.delta.token_ids))
        if self._plan.num_top_logprobs is not None:
            yield {**self._shown(delta), "logprobs": _logprobs(self._plan, self._tokenizer, [piece])}
        elif piece.text or piece.call_id is not None:
            yield self._shown(delta)

    def _shown(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "finish_reason": None}

    def _with_ids(self, delta: dict[str, Any], token_ids: tuple[int, ...]) -> dict[str, Any]:
        if self._plan.shows_token_ids and token_ids:
            return {**delta, "internal_content": {"token_ids": token_ids}}
        return delta


def _abnormal_reason(error: Exception) -> str:
    """Moonshot's word for what cut a stream."""
    if not isinstance(error, RequestError):
        return "unknown"
    return {429: "engine_overloaded", 500: "unexpected_state"}.get(error.status, "server_interrupted")


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.channel is Channel.TOOLS:
        return call_delta(piece)
    return {FIELD_OF_CHANNEL[piece.channel]: piece.text}


def _message(request: GenerateRequest, pieces: Sequence[Piece]) -> dict[str, Any]:
    transcript = collect(piece.delta for piece in pieces)
    message: dict[str, Any] = {"role": "assistant", "content": transcript.content}
    if request.start_channel is Channel.REASONING:
        message["reasoning_content"] = transcript.reasoning
    if calls := whole_calls(pieces):
        message["tool_calls"] = calls
    return message


def _logprobs(plan: ChatPlan, tokenizer: Tokenizer, pieces: Sequence[Piece]) -> dict[str, Any] | None:
    """Entries for every token of the response, and apart from them for those of the reasoning; none for calls."""
    if plan.num_top_logprobs is None:
        return None
    entries: dict[str, list[dict[str, Any]]] = {"content": [], "reasoning_content": []}
    was_resent = any(piece.delta.is_resent for piece in pieces)
    for piece in pieces:
        if piece.channel is Channel.TOOLS:
            continue
        entries["content" if was_resent else FIELD_OF_CHANNEL[piece.channel]] += [
            token_entry(tokenizer, item) for item in piece.logprobs
        ]
    return entries if entries["reasoning_content"] else {"content": entries["content"]}


def token_entry(tokenizer: Tokenizer, item: TokenLogprob) -> dict[str, Any]:
    top = [_token(tokenizer, token_id, logprob) for token_id, logprob in item.top]
    return {**_token(tokenizer, item.token_id, item.logprob), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelled = list(tokenizer.token_bytes(token_id))
    return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": spelled}


def _max_tokens(request: ChatRequest) -> int | None:
    given = {name: getattr(request, name) for name in ("max_completion_tokens", "max_tokens")}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be an integer of at least 1", param=name)
    if len(set(given.values())) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ; they mean the same, send only one", param="max_tokens"
        )
    return next(iter(given.values()), None)


def _num_top_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs is {request.top_logprobs}; it must be an integer from 0 to {MAX_LOGPROBS}"
        raise RequestError(message, param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None
