"""Every check of a request before the engine sees it, each failing with an error that names the field."""

import re
from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from perilune.engine.client import ModelInfo
from perilune.errors import RequestError
from perilune.sampling.params import MAX_LOGIT_BIASES, SamplingParams
from perilune.server.openai.schema import (
    NESTED,
    NOTHING,
    UNSUPPORTED_IN_CHAT,
    CompletionRequest,
    Sampling,
)

T = TypeVar("T", bound=msgspec.Struct)

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
)

_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(.*)`$")
_TYPES = re.compile(r"^Expected `(.*)`, got `(.*)`$")
_JSON_NAMES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def decode_body(body: bytes, kind: type[T]) -> T:
    """Parse a request body; RequestError says what is wrong with it and where."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), kind) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", code="invalid_json") from error


def _validation_error(text: str, kind: type[msgspec.Struct]) -> RequestError:
    match = _PLACE.search(text)
    # a value inside a mapping is told of as [...]
    place = match.group(1).removesuffix("[...]") if match else ""
    problem = text[: match.start()] if match else text
    if field := _FIELD.match(problem):
        param = f"{place}.{field.group(1)}".lstrip(".")
        if "missing" in problem:
            return RequestError(f"{param} is missing", param=param, code="missing_field")
        fields = NESTED.get(re.sub(r"\[\d+\]", "", place), kind).__struct_fields__
        allowed = ", ".join(name for name in fields if name not in UNSUPPORTED_IN_CHAT)
        message = f"{param} is not a field of this API; allowed are {allowed}"
        return RequestError(message, param=param, code="unknown_field")
    if types := _TYPES.match(problem):
        wanted, given = (" or ".join(_JSON_NAMES.get(t, t) for t in names.split(" | ")) for names in types.groups())
        problem = f"expected {wanted}, got {given}"
    return RequestError(f"{place or 'the body'}: {problem}", param=place or None, code="wrong_type")


def check_model(name: str | None, model: ModelInfo) -> None:
    if name is not None and name != model.name:
        raise RequestError(
            f"there is no model {name!r} here; this server has {model.name!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def check_unsupported(request: msgspec.Struct, reasons: Mapping[str, str]) -> None:
    """Refuse a field that asks for something this server cannot do; an empty value asks for nothing."""
    for name, reason in reasons.items():
        if getattr(request, name) not in NOTHING:
            raise RequestError(reason, param=name, code="unsupported")


def check_length(given: Sized, most: int, param: str) -> None:
    if len(given) > most:
        raise RequestError(f"{param} has {len(given)} entries; at most {most} are allowed", param=param)


def check_word(value: str, allowed: Iterable[str], param: str) -> None:
    if value not in allowed:
        raise RequestError(f"{param} is {value[:80]!r}; allowed are {', '.join(allowed)}", param=param)


def num_choices(request: Sampling, num_prompts: int, limit: int) -> int:
    """The checked `n` of a request."""
    n = 1 if request.n is None else request.n
    if n < 1:
        raise RequestError(f"n is {n}; it must be an integer of at least 1", param="n")
    if n * num_prompts > limit:
        raise RequestError(
            f"the request asks for {n * num_prompts} answers; at most {limit} are allowed in one request",
            param="n" if n > 1 else "prompt",
        )
    return n


def check_stream_options(request: Sampling) -> bool:
    """Whether a summary of the usage is to end the stream."""
    if request.stream_options is None:
        return False
    if not request.stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
    return bool(request.stream_options.include_usage)


def sampling_params(
    request: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    default_top_p: float = 1.0,
) -> SamplingParams:
    """The sampler's view of a request."""
    values: dict[str, Any] = {"top_p": default_top_p}
    values |= {name: value for name in SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    if values.get("top_k") == -1:
        # what other servers call all of them
        values["top_k"] = 0
    stop = request.stop or ()
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logit_bias=logit_bias(request.logit_bias),
    )


def request_timeout(request: Sampling, limit_s: float | None) -> float | None:
    """Seconds that a request may take: what it asks for, or what the server allows."""
    if request.timeout is None:
        return limit_s
    if request.timeout <= 0:
        raise RequestError(f"timeout is {request.timeout:g}; it must be a number of seconds above 0", param="timeout")
    if limit_s is not None and request.timeout > limit_s:
        raise RequestError(
            f"timeout is {request.timeout:g}; this server allows at most {limit_s:g} seconds", param="timeout"
        )
    return request.timeout


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index`: with a seed, each choice draws from a seed of its own."""
    if params.seed is None or index == 0:
        return params
    # wraps inside the signed 64 bits that a seed may have
    return replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)


def check_context(num_prompt_tokens: int, max_tokens: int | None, model: ModelInfo, param: str) -> None:
    """Refuse a prompt that leaves no room for what is asked."""
    room = model.max_model_len - num_prompt_tokens
    if room >= (max_tokens or 1):
        return
    asked = "one token must be left for the answer" if max_tokens is None else f"{max_tokens} were asked for the answer"
    raise RequestError(
        f"the context of {model.name} is {model.max_model_len} tokens; the prompt has {num_prompt_tokens} and {asked}: "
        "shorten the prompt or ask for fewer tokens",
        param=param if room < 1 or max_tokens is None else "max_tokens",
        code="context_length_exceeded",
    )


def completion_prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts of a completion request: texts, or lists of token ids."""
    prompt = request.prompt
    items = [prompt] if isinstance(prompt, str) else prompt
    texts = [item for item in items if isinstance(item, str)]
    token_ids = [item for item in items if isinstance(item, int)]
    token_lists = [item for item in items if isinstance(item, list)]
    if not items:
        raise RequestError("prompt is an empty list; it must hold at least one prompt", param="prompt")
    if len(items) not in (len(texts), len(token_ids), len(token_lists)):
        raise RequestError(
            "prompt mixes kinds; it must be all texts, all token ids or all lists of token ids", param="prompt"
        )
    return texts or ([token_ids] if token_ids else token_lists)


def logit_bias(given: Mapping[str, float] | None) -> dict[int, float]:
    """Biases by token id; JSON can only spell the ids as text."""
    biases = {}
    check_length(given or (), MAX_LOGIT_BIASES, "logit_bias")
    for key, bias in (given or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(f"logit_bias names token {key[:80]!r}; it must be a token id", param="logit_bias")
        biases[int(key)] = bias
    return biases


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds token id {token_id}; this model's ids are 0 to {vocab_size - 1}", param=param
            )
