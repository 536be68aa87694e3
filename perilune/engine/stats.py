"""What the engine counts. Names are neutral; whoever prints them chooses the outward names."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from perilune.cache.manager import CacheUsage
from perilune.cache.tiers.store import TierStats
from perilune.engine.batch import ScheduledBatch
from perilune.engine.request import FinishReason, Request
from perilune.speculative.policy import DraftStats

__all__ = ["DraftStats", "EngineStats", "Histogram", "HistogramData", "StatsRecorder", "TierStats"]

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
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


_NO_LATENCIES = Histogram(LATENCY_BOUNDS_S).snapshot()
_NO_LENGTHS = Histogram(TOKEN_BOUNDS).snapshot()


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment: gauges, counters since start (`_total`) and histograms.

    What `behind` gives counts on from an engine before this one.
    """

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    slots_total: int = 0
    slots_used: int = 0
    blocks_kept: int = 0
    slots_kept: int = 0
    prefix_tokens_asked_total: int = 0
    prefix_tokens_hit_total: int = 0
    blocks_evicted_total: int = 0
    states_evicted_total: int = 0
    tier_tokens_hit_total: Mapping[str, int] = field(default_factory=dict)
    tiers: tuple[TierStats, ...] = ()
    drafts: DraftStats | None = None
    num_preemptions_total: int = 0
    num_rejected_total: int = 0
    num_steps_total: int = 0
    num_restarts_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    finished_total: Mapping[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    time_to_first_token_s: HistogramData = _NO_LATENCIES
    inter_token_latency_s: HistogramData = _NO_LATENCIES
    e2e_latency_s: HistogramData = _NO_LATENCIES
    queue_time_s: HistogramData = _NO_LATENCIES
    prompt_tokens: HistogramData = _NO_LENGTHS
    generation_tokens: HistogramData = _NO_LENGTHS

    def behind(self, before: "EngineStats") -> "EngineStats":
        """These gauges, and counters and histograms that go on where those of `before` stood."""
        changed: dict[str, Any] = {}
        for item in fields(self):
            name, own, earlier = item.name, getattr(self, item.name), getattr(before, item.name)
            if name.endswith("_total") and name not in _GAUGES:
                changed[name] = _sum(own, earlier)
            elif isinstance(own, HistogramData):
                counts = tuple(a + b for a, b in zip(own.counts, earlier.counts, strict=True))
                changed[name] = HistogramData(own.bounds, counts, own.total + earlier.total)
        known = {tier.name: tier for tier in before.tiers}
        tiers = tuple(_behind_tier(tier, known[tier.name]) if tier.name in known else tier for tier in self.tiers)
        drafts = self.drafts
        if drafts is not None and before.drafts is not None:
            drafts = drafts.behind(before.drafts)
        return replace(self, **changed, tiers=tiers, drafts=drafts)


# what there is in all, which is no count of what happened
_GAUGES = frozenset(("blocks_total", "slots_total"))


def _sum(own: Any, earlier: Any) -> Any:
    if isinstance(own, Mapping):
        return {name: own.get(name, 0) + earlier.get(name, 0) for name in {**earlier, **own}}
    return own + earlier


def _behind_tier(tier: TierStats, before: TierStats) -> TierStats:
    names = [item.name for item in fields(tier) if item.name.startswith("num_") and item.name != "num_objects"]
    return replace(tier, **{name: getattr(tier, name) + getattr(before, name) for name in names})


class StatsRecorder:
    """Turns the events of an engine into counters and histograms; times are readings of the engine's clock."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self._time_to_first_token_s = Histogram(LATENCY_BOUNDS_S)
        self._inter_token_latency_s = Histogram(LATENCY_BOUNDS_S)
        self._e2e_latency_s = Histogram(LATENCY_BOUNDS_S)
        self._queue_time_s = Histogram(LATENCY_BOUNDS_S)
        self._prompt_tokens = Histogram(TOKEN_BOUNDS)
        self._generation_tokens = Histogram(TOKEN_BOUNDS)

    def on_step(self, batch: ScheduledBatch, now_s: float) -> None:
        """Count a planned step, and the end of the queue for requests that run for the first time."""
        self._num_steps += 1
        self._num_preemptions += batch.num_preempted
        for sequence in batch.sequences:
            request = sequence.request
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now_s
                self._queue_time_s.observe(now_s - request.arrival_s)

    def on_token(self, request: Request, now_s: float) -> None:
        """Count one generated token, which is already in `request`."""
        self._num_generation_tokens += 1
        if request.last_token_s is None:
            self._num_prompt_tokens += request.num_prompt_tokens
            self._time_to_first_token_s.observe(now_s - request.arrival_s)
        else:
            self._inter_token_latency_s.observe(now_s - request.last_token_s)
        request.last_token_s = now_s

    def on_finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        self._finished[reason] += 1
        self._e2e_latency_s.observe(now_s - request.arrival_s)
        self._prompt_tokens.observe(request.num_prompt_tokens)
        self._generation_tokens.observe(request.num_output_tokens)

    def snapshot(
        self,
        usage: CacheUsage,
        *,
        num_running: int,
        num_waiting: int,
        tiers: tuple[TierStats, ...] = (),
        drafts: DraftStats | None = None,
    ) -> EngineStats:
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            blocks_total=usage.blocks_total,
            blocks_used=usage.blocks_used,
            slots_total=usage.slots_total,
            slots_used=usage.slots_used,
            blocks_kept=usage.blocks_kept,
            slots_kept=usage.slots_kept,
            prefix_tokens_asked_total=usage.tokens_asked,
            prefix_tokens_hit_total=usage.tokens_hit,
            blocks_evicted_total=usage.blocks_evicted,
            states_evicted_total=usage.states_evicted,
            tier_tokens_hit_total=usage.tier_tokens_hit,
            tiers=tiers,
            drafts=drafts,
            num_preemptions_total=self._num_preemptions,
            num_steps_total=self._num_steps,
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self._num_generation_tokens,
            finished_total=dict(self._finished),
            time_to_first_token_s=self._time_to_first_token_s.snapshot(),
            inter_token_latency_s=self._inter_token_latency_s.snapshot(),
            e2e_latency_s=self._e2e_latency_s.snapshot(),
            queue_time_s=self._queue_time_s.snapshot(),
            prompt_tokens=self._prompt_tokens.snapshot(),
            generation_tokens=self._generation_tokens.snapshot(),
        )
