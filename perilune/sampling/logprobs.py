"""What the sampler makes of one row of logits, as requests report it; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability and rank (1 = most probable) of one token under the model's own distribution.

    `top` lists the most probable tokens with their log-probabilities, best first; empty when none were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SampledToken:
    """The chosen token; `logprob` is None unless the request asked for log-probabilities."""

    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class SamplingFailure:
    """Why no token can be taken from a row; the request behind it must end, the others go on."""

    reason: str
