"""How many drafts each request verifies: as many as make the step's tokens cheapest, down to none.

A step over R requests that verifies m drafts in all emits R tokens and the drafts that stay. What stays is foreseen
from how drafts at each place fared before; what the step costs, from measured step times. Pure Python.

Only the past decides, never a draft that is not verified yet, so that drawn drafts may be cut to these lengths.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

# Of the weight that observations have, what is left after one more round.
_MEMORY = 0.9
# Rounds that the prior counts as.
_PRIOR_ROUNDS = 4.0
# Drafting must promise this much more than not drafting, for estimates are never exact.
_MARGIN = 1.03


class Acceptance:
    """How often drafts stay, by their place in a block, for one request or for all of them.

    Until a place is observed it is taken to be as good as the one before it, the first as `first_guess`. A request is
    taken to be like the `prior`, all requests, but at each place better or worse by as much as it was at the place
    before.
    """

    def __init__(self, num_drafts: int, prior: "Acceptance | None" = None, *, first_guess: float = 0.7):
        self.num_drafts = num_drafts
        self._prior = prior
        self._first_guess = first_guess
        self._kept = [0.0] * num_drafts
        self._tried = [0.0] * num_drafts
        self._trust = [_PRIOR_ROUNDS] * num_drafts  # the rounds that what is assumed counts as

    @property
    def rates(self) -> list[float]:
        """For each place the share of drafts that stay where all before them do."""
        return self.rates_beside(None if self._prior is None else self._prior.rates)

    def rates_beside(self, usual: Sequence[float] | None) -> list[float]:
        """As `rates`, given those of the prior."""
        found, base = list[float](), self._first_guess
        for place, (kept, tried, trust) in enumerate(zip(self._kept, self._tried, self._trust, strict=True)):
            if usual is not None:
                against = found[-1] / usual[place - 1] if found and usual[place - 1] > 0 else 1.0
                base = min(1.0, usual[place] * against)
            base = (kept + trust * base) / (tried + trust)
            found.append(base)
        return found

    def survival_beside(self, usual: Sequence[float] | None) -> list[float]:
        """For each place the chance that the drafts up to it stay, given the prior's rates."""
        return list(accumulate(self.rates_beside(usual), mul))

    @property
    def survival(self) -> list[float]:
        """For each place the chance that the drafts up to it stay."""
        return list(accumulate(self.rates, mul))

    def observe(self, num_verified: int, num_accepted: int) -> None:
        """A round verified the first `num_verified` drafts, and the first `num_accepted` of them stay."""
        assert 0 <= num_accepted <= num_verified <= self.num_drafts
        for place in range(min(num_accepted + 1, num_verified)):
            self._kept[place] = _MEMORY * self._kept[place] + (place < num_accepted)
            self._tried[place] = _MEMORY * self._tried[place] + 1.0
            self._trust[place] *= _MEMORY


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of steps over so many rows, ascending; between them a line, beyond the last the last slope."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.seconds) >= 2
        assert list(self.rows) == sorted(set(self.rows))

    @staticmethod
    def measured(points: Sequence[tuple[int, float]]) -> "StepTimes":
        """From (rows, seconds), the fastest of equal rows; more rows never cost less: what noise says else is raised.

        At least two numbers of rows.
        """
        rows, seconds, most = [], [], 0.0
        fastest = dict(sorted(points, reverse=True))
        for count, value in sorted(fastest.items()):
            most = max(most, value)
            rows.append(count)
            seconds.append(most)
        return StepTimes(tuple(rows), tuple(seconds))

    def of(self, num_rows: int) -> float:
        """Seconds of a step over `num_rows` rows."""
        place = min(max(bisect_left(self.rows, num_rows), 1), len(self.rows) - 1)
        (a, b), (start, end) = self.rows[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(start + (num_rows - a) * (end - start) / (b - a), min(self.seconds))


def choose_lengths(
    survivals: Sequence[Sequence[float]],
    times: StepTimes,
    draft_seconds: float,
    *,
    plain_seconds: float | None = None,
    most_drafts: int | None = None,
) -> list[int]:
    """How many drafts each of R requests verifies, so that tokens per second are the most that is foreseen.

    survivals[r][j] is the chance that request r's drafts up to place j stay; it never rises with j. `draft_seconds` is
    what drafting for this step costs, `plain_seconds` what a step takes that verifies nothing, as that of R rows by
    default. Together they have at most `most_drafts`. All zero where not drafting is as good.
    """
    num_requests = len(survivals)
    if plain_seconds is None:
        plain_seconds = times.of(num_requests)
    best_rate, best = _MARGIN * num_requests / plain_seconds, [0] * num_requests
    lengths, tokens = [0] * num_requests, float(num_requests)
    heap: list[tuple[float, int]] = []
    for index, survival in enumerate(survivals):
        if survival:
            heappush(heap, (-survival[0], index))
    num_rows = num_requests
    while heap and (most_drafts is None or sum(lengths) < most_drafts):
        gain, index = heappop(heap)
        tokens, num_rows = tokens - gain, num_rows + 1
        lengths[index] += 1
        if lengths[index] < len(survivals[index]):
            heappush(heap, (-survivals[index][lengths[index]], index))
        rate = tokens / (draft_seconds + times.of(num_rows))
        if rate > best_rate:
            best_rate, best = rate, list(lengths)
    return best


# Lengths that are verified: steps of few shapes are replayed from recordings, and found recorded.
COMMON_LENGTHS = (1, 3, 7, 15, 31)


def alike(lengths: Sequence[int]) -> list[int]:
    """Of guesses of such lengths those to verify: all alike, of a common length, by all or a power of two of requests.

    As many as can be within that.
    """
    best, best_members = 0, list[int]()
    for length in COMMON_LENGTHS:
        members = [index for index, own in enumerate(lengths) if own >= length]
        if len(members) < len(lengths) and members:
            members = members[: 1 << (len(members).bit_length() - 1)]
        if length * len(members) > best * len(best_members):
            best, best_members = length, members
    kept = [0] * len(lengths)
    for index in best_members:
        kept[index] = best
    return kept
