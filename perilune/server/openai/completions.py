"""The OpenAI completions dialect: raw prompts, echo, and the older form of log-probabilities."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.engine.client import ModelInfo
from perilune.engine.request import GenerateRequest, RequestOutput, TokenLogprob
from perilune.errors import RequestError
from perilune.server.choice import Choice, token_text, usage
from perilune.server.generation import Dispatcher
from perilune.server.openai.profile import PROFILES, check_profile
from perilune.server.openai.schema import NOTHING, CompletionRequest
from perilune.server.openai.structured import grammar_of_completion
from perilune.server.openai.validate import (
    check_context,
    check_model,
    check_stream_options,
    check_token_ids,
    choice_params,
    completion_prompts,
    num_choices,
    request_timeout,
    sampling_params,
)
from perilune.server.settings import ServerSettings
from perilune.server.stream import DONE, frame
from perilune.text.prompt.room import Room
from perilune.text.tokenizer import Detokenizer, Tokenizer, check_encodable

# what the OpenAI API documents as its default
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class CompletionPlan:
    """A checked completion request. With `is_echo_only` the one token that the engine must generate is not shown."""

    base: dict[str, Any]
    requests: tuple[GenerateRequest, ...]
    echoes: tuple[str | None, ...]
    n: int
    is_stream: bool
    has_usage_frame: bool
    num_top_logprobs: int | None
    is_echo_only: bool
    shows_token_ids: bool

    def texts(self, tokenizer: Tokenizer) -> "list[CompletionText]":
        """The answers to come, one for each request."""
        return [CompletionText(self, index, tokenizer) for index in range(len(self.requests))]


def plan_completion(
    request: CompletionRequest, model: ModelInfo, tokenizer: Tokenizer, settings: ServerSettings
) -> CompletionPlan:
    """Check a completion request and encode its prompts; RequestError names the field that is wrong."""
    check_model(request.model, model)
    if request.suffix not in NOTHING:
        raise RequestError(
            "suffix is not supported: this model cannot fill in text", param="suffix", code="unsupported"
        )
    if request.best_of not in (None, request.n or 1):
        raise RequestError("best_of is not supported except equal to n", param="best_of", code="unsupported")
    check_profile(request, PROFILES[settings.profile], is_thinking=True)
    max_tokens, is_echo_only = _max_tokens(request)
    # by their number first: to look at each of millions takes seconds
    if isinstance(request.prompt, list) and request.prompt:
        if isinstance(request.prompt[0], int):
            check_context(len(request.prompt), max_tokens, model, "prompt")
        else:
            num_choices(request, len(request.prompt), settings.max_choices)
    prompts = completion_prompts(request)
    n = num_choices(request, len(prompts), settings.max_choices)
    params = sampling_params(
        request,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    has_usage_frame = check_stream_options(request)
    timeout_s = request_timeout(request, settings.request_timeout_s)
    grammar = grammar_of_completion(request)
    response_id = f"cmpl-{int(time.time()):08x}{secrets.token_hex(8)}"
    requests: list[GenerateRequest] = []
    for token_ids in (_prompt_ids(prompt, max_tokens, tokenizer, model) for prompt in prompts):
        for index in range(len(requests), len(requests) + n):
            requests.append(
                GenerateRequest(
                    f"{response_id}-{index}",
                    token_ids,
                    choice_params(params, index),
                    grammar=grammar,
                    priority=request.priority or 0,
                    timeout_s=timeout_s,
                    cache_salt=request.cache_salt,
                )
            )
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
    return CompletionPlan(
        base={"id": response_id, "object": "text_completion", "created": int(time.time()), "model": model.name},
        requests=tuple(requests),
        echoes=tuple(text if request.echo else None for text in texts for _ in range(n)),
        n=n,
        is_stream=bool(request.stream),
        has_usage_frame=has_usage_frame,
        num_top_logprobs=request.logprobs,
        is_echo_only=is_echo_only,
        shows_token_ids=bool(request.return_token_ids),
    )


class CompletionText:
    """One choice of a completion: its text and log-probabilities as they come, the echoed prompt first."""

    def __init__(self, plan: CompletionPlan, index: int, tokenizer: Tokenizer):
        self.choice = Choice(plan.requests[index], tokenizer)
        self._plan = plan
        self._tokenizer = tokenizer
        self._request = plan.requests[index]
        self._echo = plan.echoes[index]
        self._offsets = Detokenizer(tokenizer)
        self._num_echoed = len(self._request.prompt_token_ids) if self._echo is not None else 0
        self._offset = 0
        self._token_ids: list[int] = []
        self._has_shown_prompt = False

    def push(self, output: RequestOutput) -> tuple[str, list[TokenLogprob | int]]:
        """New text, and its tokens when log-probabilities were asked for; a bare id is a token without a past."""
        text, tokens = "", []
        if self._echo is not None:
            text, self._echo = self._echo, None
            tokens = _prompt_tokens(self._request, output)
        pieces = self.choice.push(output)
        if self._plan.is_echo_only:
            self.choice.num_output_tokens = 0
            self.choice.finish_reason = self.choice.finish_reason and "length"
            pieces = []
        elif self._plan.shows_token_ids:
            self._token_ids += output.token_ids
        return text + "".join(piece.text for piece in pieces), [*tokens, *(t for p in pieces for t in p.logprobs)]

    def token_ids(self) -> dict[str, Any]:
        """The ids generated since the last call, where they were asked for, and once those of the prompt."""
        if not self._plan.shows_token_ids:
            return {}
        shown: dict[str, Any] = {"token_ids": self._token_ids}
        if not self._has_shown_prompt:
            shown["prompt_token_ids"] = list(self._request.prompt_token_ids)
        self._token_ids, self._has_shown_prompt = [], True
        return shown

    def logprobs(self, tokens: Sequence[TokenLogprob | int]) -> dict[str, Any] | None:
        """The entries of `tokens`, which continue those of the calls before."""
        if self._plan.num_top_logprobs is None:
            return None
        entries: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            token_id = token if isinstance(token, int) else token.token_id
            entries["tokens"].append(token_text(self._tokenizer, token_id))
            entries["token_logprobs"].append(None if isinstance(token, int) else token.logprob)
            entries["top_logprobs"].append(None if isinstance(token, int) else self._top(token))
            entries["text_offset"].append(self._offset)
            self._offset += len(self._offsets.push([token_id]))
            self._num_echoed -= 1
            if self._num_echoed == 0:
                # what follows is text of its own, in which not every control token is shown
                self._offset += len(self._offsets.flush())
                self._offsets = Detokenizer(self._tokenizer, skip_special=True)
        return entries

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        return {token_text(self._tokenizer, token_id): logprob for token_id, logprob in token.top}


async def answer_completion(
    plan: CompletionPlan, states: Sequence[CompletionText], dispatcher: Dispatcher
) -> dict[str, Any]:
    """Run the plan and give the whole answer."""
    texts = [""] * len(states)
    tokens: list[list[TokenLogprob | int]] = [[] for _ in states]
    async with dispatcher.open(plan.requests) as outputs:
        async for index, output in outputs:
            text, new_tokens = states[index].push(output)
            texts[index] += text
            tokens[index] += new_tokens
    answers = [_answer(index, texts[index], state, tokens[index]) for index, state in enumerate(states)]
    return {**plan.base, "choices": answers, "usage": usage([state.choice for state in states], plan.n)}


async def stream_completion(
    plan: CompletionPlan, states: Sequence[CompletionText], dispatcher: Dispatcher
) -> AsyncGenerator[bytes, None]:
    """Run the plan and give the answer frame by frame; the first frame comes with the first output."""
    async with dispatcher.open(plan.requests) as outputs:
        async for index, output in outputs:
            state = states[index]
            text, tokens = state.push(output)
            # with ids, every token is told when it comes, also one that is not yet a whole character
            if text or tokens or plan.shows_token_ids or state.choice.finish_reason is not None:
                yield frame({**plan.base, "choices": [_answer(index, text, state, tokens)]})
    if plan.has_usage_frame:
        totals = usage([state.choice for state in states], plan.n)
        yield frame({**plan.base, "choices": [], "usage": totals})
    yield DONE


def _answer(index: int, text: str, state: CompletionText, tokens: Sequence[TokenLogprob | int]) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": state.logprobs(tokens),
        "finish_reason": state.choice.finish_reason,
        "stop_reason": state.choice.stop_reason,
        **state.token_ids(),
    }


def _prompt_ids(prompt: str | list[int], max_tokens: int, tokenizer: Tokenizer, model: ModelInfo) -> tuple[int, ...]:
    if isinstance(prompt, str):
        check_encodable(prompt, "prompt")
        room = Room(model.max_model_len, tokenizer)
        room.take(prompt, "prompt")
        token_ids = tokenizer.encode_markup(prompt, room.at_most)
        room.check(len(token_ids))
        check_context(len(token_ids), max_tokens, model, "prompt")
        return tuple(token_ids)
    check_context(len(prompt), max_tokens, model, "prompt")
    check_token_ids(prompt, model.vocab_size, "prompt")
    return tuple(prompt)


def _max_tokens(request: CompletionRequest) -> tuple[int, bool]:
    """How many tokens to generate, and whether that is only to learn about the prompt."""
    if request.max_tokens == 0 and request.echo:
        return 1, True
    if request.max_tokens is not None and request.max_tokens < 1:
        allowed = "at least 1, or 0 with echo"
        raise RequestError(f"max_tokens is {request.max_tokens}; it must be {allowed}", param="max_tokens")
    return DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens, False


def _prompt_tokens(request: GenerateRequest, output: RequestOutput) -> list[TokenLogprob | int]:
    if output.prompt_logprobs is None:
        return []
    return [
        token_id if logprob is None else logprob
        for token_id, logprob in zip(request.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]
