"""The log-probability of one token, as requests report it; imports no torch."""

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
