"""What a request asks of the sampler, checked once when it is made.

Knows no tensors and no vocabulary: whether an id exists in a model is the engine's question.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from perilune.errors import RequestError

LARGEST = sys.float_info.max
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024


def _check_number(
    name: str, value: object, low: float, high: float, *, above_low: bool = False, param: str | None = None
) -> None:
    """Refuse anything but a finite number in [low, high], or in (low, high] with `above_low`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_high_enough = value > low if above_low else value >= low
        if is_high_enough and value <= high:
            return
    limits = f"{'above' if above_low else 'at least'} {low:g}" + ("" if high == LARGEST else f" and at most {high:g}")
    raise RequestError(f"{name} is {_shown(value)}; it must be a finite number {limits}", param=param or name)


def _check_integer(name: str, value: object, low: int, high: int | None, *, param: str | None = None) -> None:
    """Refuse anything but an integer from low to high, both included."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high):
        return
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise RequestError(f"{name} is {_shown(value)}; it must be an integer {limits}", param=param or name)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a very large integer"
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of one request are chosen and when it ends; wrong values raise RequestError.

    Applied in this order: `logit_bias`, the three penalties, `temperature`, `top_k`, `top_p`, `min_p`.
    `temperature` 0 takes the most probable token. `top_k` 0 is off. `max_tokens` None means up to the context.
    `logprobs` asks for the log-probability of each chosen token and that many alternatives (0 to 20).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, LARGEST)
        _check_number("top_p", self.top_p, 0, 1, above_low=True)
        _check_integer("top_k", self.top_k, 0, None)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {_shown(self.ignore_eos)}; it must be true or false", param="ignore_eos")
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        for name, limit in (("stop", MAX_STOP_STRINGS), ("stop_token_ids", MAX_STOP_TOKEN_IDS)):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise RequestError(f"{name} is {_shown(value)}; it must be a list", param=name)
            if len(value) > limit:
                raise RequestError(f"{name} has {len(value)} entries; at most {limit} are allowed", param=name)
            object.__setattr__(self, name, tuple(value))
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise RequestError(
                    f"stop holds {_shown(text)}; each entry must be a string of 1 to {MAX_STOP_LENGTH} characters",
                    param="stop",
                )
        for token_id in self.stop_token_ids:
            _check_integer("an entry of stop_token_ids", token_id, 0, None, param="stop_token_ids")

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {_shown(self.logit_bias)}; it must map token ids to numbers", param="logit_bias"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIASES} are allowed",
                param="logit_bias",
            )
        for token_id, bias in self.logit_bias.items():
            _check_integer("a token id of logit_bias", token_id, 0, None, param="logit_bias")
            _check_number(f"the logit_bias of token {token_id}", bias, -100, 100, param="logit_bias")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
