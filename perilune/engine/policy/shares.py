"""How the prompt tokens of a step are shared among prompts. Arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Claim:
    """A prompt with `num_pending` tokens to compute behind `start`; a step could take the first `num_ready`."""

    priority: int
    num_pending: int
    num_ready: int
    start: int = 0

    def fit(self, count: int, grain: int) -> int:
        """At most `count` tokens, that end at a multiple of `grain` or with what is ready."""
        if count >= self.num_ready:
            return self.num_ready
        return max(0, (self.start + count) // grain * grain - self.start)


def share(budget: int, claims: Sequence[Claim], grain: int = 1) -> list[int]:
    """Tokens for each claim, `budget` in all; claims come in order of priority, then of arrival.

    A priority gets what the ones before it leave. Half of that, rounded up, is for its first claim that can use any, so
    the oldest prompt always gets on and each prompt becomes the oldest in time. The other half goes to the rest, the
    shortest first, so that a short prompt waits for shorter ones only. What either half leaves, the other takes.

    A prompt is cut at multiples of `grain` tokens, unless the whole budget is smaller than that.
    """
    if budget < grain:
        grain = 1
    shares: list[int] = []
    for _, group in groupby(claims, key=lambda claim: claim.priority):
        shares += _share_equals(budget - sum(shares), list(group), grain)
    return shares


def _share_equals(budget: int, claims: Sequence[Claim], grain: int) -> list[int]:
    shares = [0] * len(claims)
    first = next((index for index, claim in enumerate(claims) if claim.num_ready > 0), None)
    if first is None:
        return shares
    shares[first] = claims[first].fit(max(-(-budget // 2), min(budget, grain)), grain)
    budget -= shares[first]
    others = [index for index in range(len(claims)) if index != first]
    for index in [*sorted(others, key=lambda index: claims[index].num_pending), first]:
        more = claims[index].fit(shares[index] + budget, grain) - shares[index]
        shares[index] += more
        budget -= more
    return shares
