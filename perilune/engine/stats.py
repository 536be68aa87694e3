"""What the engine counts. Names are neutral; whoever prints them chooses the outward names."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from perilune.engine.request import FinishReason

LATENCY_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
TOKEN_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


@dataclass(frozen=True)
class HistogramData:
    """A histogram at one moment: `counts[i]` values lie at or below `bounds[i]` and above the bound before it.

    `counts` has one entry more than `bounds`, for values above the last bound; `total` is the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts observations in fixed buckets."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramData:
        return HistogramData(self._bounds, tuple(self._counts), self._total)


def _empty(bounds: tuple[float, ...]) -> HistogramData:
    return Histogram(bounds).snapshot()


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment: gauges, counters since start (`_total`) and histograms."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    slots_total: int = 0
    slots_used: int = 0
    num_preemptions_total: int = 0
    num_steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    finished_total: Mapping[FinishReason, int] = dict.fromkeys(FinishReason, 0)  # noqa: RUF009 - never written
    time_to_first_token_s: HistogramData = _empty(LATENCY_BOUNDS_S)
    inter_token_latency_s: HistogramData = _empty(LATENCY_BOUNDS_S)
    e2e_latency_s: HistogramData = _empty(LATENCY_BOUNDS_S)
    queue_time_s: HistogramData = _empty(LATENCY_BOUNDS_S)
    prompt_tokens: HistogramData = _empty(TOKEN_BOUNDS)
    generation_tokens: HistogramData = _empty(TOKEN_BOUNDS)
