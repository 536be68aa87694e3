"""How many prompt tokens a step may take so that answers in the making go on in time.

A pure controller: it is told what steps took and has no clock, no requests and no tensors.
"""

from bisect import bisect_right
from math import sqrt

# A step is planned so that it may take longer than expected by so many standard deviations of chance: 1 % do.
MARGIN = 2.5
# From one step to the next, and beyond the most ever seen, prompt tokens grow by this factor at most: what was learned
# may be wrong.
MOST_GROWTH = 1.5
# Prompts go on at this rate at least, also where the bound cannot be kept.
LEAST_PROMPT_TOKENS = 16
# Standard deviations, as shares of the time of a step: what each cost drifts by from one step to the next, and what a
# step is off by chance, which is learned from the latest steps and is never taken for less.
DRIFT, FIRST_NOISE, LEAST_NOISE = 0.005, 0.12, 0.03
NOISE_WEIGHT = 0.03
# A step that is off by so many standard deviations is ignored, unless as many in a row are.
STRANGE, MOST_STRANGE = 4.0, 3
# So many decodes, and so many prompt tokens, are taken to cost what a step costs at least, until it is known.
DECODE_UNIT, PROMPT_UNIT = 8, 64

_Point = tuple[float, float, float]


class StepCost:
    """Learns what a step costs: a fixed time, one for each decode and one for each prompt token.

    A Kalman filter whose state, the three costs, walks at random. It knows how sure it is of each combination of costs,
    so that what is new in a step (more decodes, more prompt tokens) explains what is new in its time.
    """

    def __init__(self) -> None:
        self._costs = [0.0, 0.0, 0.0]
        self._covariance: list[list[float]] = []
        self._num_strange = 0
        self._noise = FIRST_NOISE

    def observe(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step that computed so many prompt tokens beside so many decodes."""
        if not self._covariance:
            self._forget(seconds)
        point = _point(num_prompt_tokens, num_decodes)
        expected, variance = self._predict(point)
        scale = max(expected, min(seconds, 2 * expected)) if expected > 0 else seconds
        spread = variance + (self._noise * scale) ** 2
        surprise = seconds - expected
        if surprise**2 > STRANGE**2 * spread:
            self._num_strange += 1
            if self._num_strange < MOST_STRANGE:
                return
            self._forget(seconds)
            variance = self._predict(point)[1]
            spread = variance + (self._noise * seconds) ** 2
        elif expected > 0:
            self._learn_noise(surprise**2 - variance, max(expected, seconds))
        self._num_strange = 0
        self._correct(point, surprise, spread, drift=(DRIFT * seconds) ** 2)

    def upper(self, num_prompt_tokens: int, num_decodes: int) -> float:
        """Seconds that such a step takes at most, but for chance in one of a hundred and for what is not known yet."""
        if not self._covariance:
            return 0.0
        expected, variance = self._predict(_point(num_prompt_tokens, num_decodes))
        return expected * (1 + MARGIN * self._noise) + sqrt(variance)

    def _learn_noise(self, variance: float, scale: float) -> None:
        square = self._noise**2 + NOISE_WEIGHT * (max(0.0, variance) / scale**2 - self._noise**2)
        self._noise = max(LEAST_NOISE, sqrt(square))

    def _forget(self, seconds: float) -> None:
        self._covariance = [[seconds**2 if row == column else 0.0 for column in range(3)] for row in range(3)]

    def _predict(self, point: _Point) -> tuple[float, float]:
        expected = sum(cost * x for cost, x in zip(self._costs, point, strict=True))
        variance = sum(x * y for x, y in zip(self._toward(point), point, strict=True))
        return expected, max(0.0, variance)

    def _toward(self, point: _Point) -> list[float]:
        return [sum(value * x for value, x in zip(row, point, strict=True)) for row in self._covariance]

    def _correct(self, point: _Point, surprise: float, spread: float, drift: float) -> None:
        toward = self._toward(point)
        for row in range(3):
            self._costs[row] += toward[row] / spread * surprise
            for column in range(3):
                self._covariance[row][column] -= toward[row] * toward[column] / spread
            self._covariance[row][row] += drift


class StepBudget:
    """Keeps steps with decodes below `max_itl_s` seconds by bounding their prompt tokens."""

    def __init__(self, max_itl_s: float, max_num_batched_tokens: int):
        self._max_itl_s = max_itl_s
        self._most = max_num_batched_tokens
        self._granted = LEAST_PROMPT_TOKENS
        self._most_seen = LEAST_PROMPT_TOKENS
        self._cost = StepCost()

    def observe(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step that computed so many prompt tokens beside so many decodes."""
        if num_prompt_tokens == 0:
            return
        self._cost.observe(num_prompt_tokens, num_decodes, seconds)
        self._most_seen = max(self._most_seen, num_prompt_tokens)

    def prompt_tokens(self, num_decodes: int, spent_s: float = 0.0) -> int:
        """The most prompt tokens for a step with `num_decodes` decodes, of whose time `spent_s` is gone already."""
        if num_decodes == 0:
            return self._most
        most = min(self._most, int(min(self._granted, self._most_seen) * MOST_GROWTH))
        self._granted = self._affordable(num_decodes, self._max_itl_s, most)
        return self._affordable(num_decodes, self._max_itl_s - spent_s, self._granted) if spent_s else self._granted

    def _affordable(self, num_decodes: int, seconds: float, most: int) -> int:
        counts = range(min(LEAST_PROMPT_TOKENS, most), most + 1)
        found = bisect_right(counts, seconds, key=lambda count: self._cost.upper(count, num_decodes))
        return counts[max(0, found - 1)]


def _point(num_prompt_tokens: int, num_decodes: int) -> _Point:
    return 1.0, num_decodes / DECODE_UNIT, num_prompt_tokens / PROMPT_UNIT
