"""Repeated timings and their spread."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median, quantiles
from typing import Self


@dataclass(frozen=True)
class Spread:
    """A median between the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(median(values), min(values), max(values))

    @classmethod
    def quartiles(cls, values: Sequence[float]) -> Self:
        """The median between the quartiles, for many values of which single ones are far off; at least two values."""
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


def time_calls(
    calls: Sequence[Callable[[], object]],
    *,
    enough_s: float = 0.5,
    longest_s: float = 5.0,
    fewest: int = 3,
    most: int = 200,
    clock: Callable[[], float] = time.perf_counter,
) -> Spread:
    """Seconds of one call; the calls take turns, the first of them once untimed.

    Repeats until `enough_s` have passed and `fewest` calls were timed, or `longest_s` have, or `most` were timed.
    """
    calls[0]()
    taken: list[float] = []
    start = clock()
    for turn in count(1):
        before = clock()
        calls[turn % len(calls)]()
        taken.append(clock() - before)
        passed = clock() - start
        if len(taken) >= most or passed >= longest_s or (len(taken) >= fewest and passed >= enough_s):
            return Spread.of(taken)
    raise AssertionError("count never ends")
