"""How the prompt tokens of a step are shared among prompts. Arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Claim:
    """A prompt with `num_pending` tokens to compute, of which a step could take the first `num_ready`."""

    priority: int
    num_pending: int
    num_ready: int


def share(budget: int, claims: Sequence[Claim]) -> list[int]:
    """Tokens for each claim, `budget` in all; claims come in order of priority, then of arrival.

    A priority gets what the ones before it leave. Half of that, rounded up, is for its first claim that can use any, so
    the oldest prompt always gets on and each prompt becomes the oldest in time. The other half goes to the rest, the
    shortest first, so that a short prompt waits for shorter ones only. What either half leaves, the other takes.
    """
    shares: list[int] = []
    for _, group in groupby(claims, key=lambda claim: claim.priority):
        shares += _share_equals(budget - sum(shares), list(group))
    return shares


def _share_equals(budget: int, claims: Sequence[Claim]) -> list[int]:
    shares = [0] * len(claims)
    first = next((index for index, claim in enumerate(claims) if claim.num_ready > 0), None)
    if first is None:
        return shares
    shares[first] = min(claims[first].num_ready, -(-budget // 2))
    budget -= shares[first]
    others = [index for index in range(len(claims)) if index != first]
    for index in [*sorted(others, key=lambda index: claims[index].num_pending), first]:
        more = min(budget, claims[index].num_ready - shares[index])
        shares[index] += more
        budget -= more
    return shares
