"""Prometheus text from the engine's counters, under names shaped as vLLM's so that existing boards map over."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from perilune.engine.stats import DraftStats, EngineStats, HistogramData, TierStats

GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests in the running batch.", lambda s: s.num_running),
    "num_requests_waiting": ("Requests that wait to be scheduled.", lambda s: s.num_waiting),
    "kv_cache_usage_perc": ("Share of cache blocks in use, 0 to 1.", lambda s: s.blocks_used / max(s.blocks_total, 1)),
    "num_blocks_total": ("Cache blocks there are.", lambda s: s.blocks_total),
    "num_blocks_used": ("Cache blocks in use.", lambda s: s.blocks_used),
    "num_blocks_kept": ("Cache blocks kept for requests with the same beginning.", lambda s: s.blocks_kept),
    "num_blocks_free": ("Cache blocks that requests can have.", lambda s: s.blocks_total - s.blocks_used),
    "num_state_slots_total": ("State slots there are.", lambda s: s.slots_total),
    "num_state_slots_used": ("State slots in use.", lambda s: s.slots_used),
    "num_state_slots_kept": ("State slots kept for requests with the same beginning.", lambda s: s.slots_kept),
    "num_state_slots_free": ("State slots that requests can have.", lambda s: s.slots_total - s.slots_used),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_preemptions": ("Requests set back to make room for others.", lambda s: s.num_preemptions_total),
    "num_requests_rejected": ("Requests rejected because the queue was full.", lambda s: s.num_rejected_total),
    "prefix_cache_queries": ("Tokens asked of the prefix cache.", lambda s: s.prefix_tokens_asked_total),
    "prefix_cache_hits": ("Tokens that the prefix cache had.", lambda s: s.prefix_tokens_hit_total),
    "prefix_cache_evicted_blocks": ("Kept blocks given to others.", lambda s: s.blocks_evicted_total),
    "prefix_cache_evicted_states": ("Kept states given up for others.", lambda s: s.states_evicted_total),
    "num_steps": ("Forward passes.", lambda s: s.num_steps_total),
    "engine_restarts": ("Engine processes made in place of one that died.", lambda s: s.num_restarts_total),
    "prompt_tokens": ("Prompt tokens computed.", lambda s: s.prompt_tokens_total),
    "generation_tokens": ("Tokens generated.", lambda s: s.generation_tokens_total),
}
TIER_GAUGES: dict[str, tuple[str, Callable[[TierStats], float]]] = {
    "kv_tier_objects": ("Blocks and states that a tier below the cache holds.", lambda t: t.num_objects),
    "kv_tier_used_bytes": ("What they take.", lambda t: t.bytes_used),
    "kv_tier_budget_bytes": ("The most that they may take.", lambda t: t.budget_bytes),
}
TIER_COUNTERS: dict[str, tuple[str, Callable[[TierStats], float]]] = {
    "kv_tier_hits": ("Objects that were asked of a tier and loaded.", lambda t: t.num_hits),
    "kv_tier_misses": ("Objects that were asked of a tier and not there.", lambda t: t.num_misses),
    "kv_tier_stored": ("Objects that a tier took.", lambda t: t.num_stored),
    "kv_tier_evicted": ("Objects that had to leave a tier for others.", lambda t: t.num_evicted),
    "kv_tier_refused": ("Objects that a tier could not take.", lambda t: t.num_refused),
    "kv_tier_damaged": ("Files of a tier that were not what they claim.", lambda t: t.num_damaged),
    "kv_tier_failed": ("Reads and writes of a tier that failed.", lambda t: t.num_failed),
}
DRAFT_COUNTERS: dict[str, tuple[str, Callable[[DraftStats], float]]] = {
    "spec_decode_num_drafts": ("Times that an answer had guesses verified.", lambda d: d.num_rounds),
    "spec_decode_num_draft_tokens": ("Guesses verified.", lambda d: d.num_drafted),
    "spec_decode_num_accepted_tokens": ("Guesses that were right, as all before them.", lambda d: d.num_accepted),
    "spec_decode_steps": ("Steps with answers.", lambda d: d.num_steps),
    "spec_decode_plain_steps": ("Steps with answers that verified nothing.", lambda d: d.num_plain_steps),
}
PLACE_COUNTERS: dict[str, tuple[str, Callable[[DraftStats], tuple[int, ...]]]] = {
    "spec_decode_num_reached_tokens_per_pos": ("Guesses behind none that was wrong, by place.", lambda d: d.tried),
    "spec_decode_num_accepted_tokens_per_pos": ("Of those, the ones that were right.", lambda d: d.kept),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], HistogramData]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", lambda s: s.time_to_first_token_s),
    "inter_token_latency_seconds": ("From one token to the next.", lambda s: s.inter_token_latency_s),
    "e2e_request_latency_seconds": ("From arrival to the last token.", lambda s: s.e2e_latency_s),
    "request_queue_time_seconds": ("From arrival to the first step.", lambda s: s.queue_time_s),
    "request_prompt_tokens": ("Prompt tokens of a request.", lambda s: s.prompt_tokens),
    "request_generation_tokens": ("Tokens generated for a request.", lambda s: s.generation_tokens),
}


class EngineCollector(Collector):
    """Turns one snapshot of the engine into metric families, labelled with the model's name."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str):
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats, labels = self._stats(), [self._model_name]
        for name, (doc, read) in GAUGES.items():
            gauge = GaugeMetricFamily(f"perilune:{name}", doc, labels=["model_name"])
            gauge.add_metric(labels, read(stats))
            yield gauge
        for name, (doc, read) in COUNTERS.items():
            counter = CounterMetricFamily(f"perilune:{name}", doc, labels=["model_name"])
            counter.add_metric(labels, read(stats))
            yield counter
        for name, (doc, histogram) in HISTOGRAMS.items():
            yield _histogram(name, doc, histogram(stats), labels)
        yield from _tier_metrics(stats, labels)
        if stats.drafts is not None:
            yield from _draft_metrics(stats.drafts, labels)
        finished = CounterMetricFamily(
            "perilune:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.finished_total.items():
            finished.add_metric([*labels, reason.value], count)
        yield finished


def _tier_metrics(stats: EngineStats, labels: list[str]) -> Iterator[Metric]:
    """One value per tier; nothing of an engine that has none."""
    names = ["model_name", "tier"]
    for name, (doc, read) in TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"perilune:{name}", doc, labels=names)
        for tier in stats.tiers:
            gauge.add_metric([*labels, tier.name], read(tier))
        yield gauge
    for name, (doc, read) in TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"perilune:{name}", doc, labels=names)
        for tier in stats.tiers:
            counter.add_metric([*labels, tier.name], read(tier))
        yield counter
    hits = CounterMetricFamily(
        "perilune:prefix_cache_tier_hits", "Tokens that had to be loaded, by tier.", labels=names
    )
    for tier_name, num_tokens in stats.tier_tokens_hit_total.items():
        hits.add_metric([*labels, tier_name], num_tokens)
    yield hits


def _draft_metrics(drafts: DraftStats, labels: list[str]) -> Iterator[Metric]:
    """What guessing tokens did, in all and by their place behind the last known one."""
    for name, (doc, read) in DRAFT_COUNTERS.items():
        counter = CounterMetricFamily(f"perilune:{name}", doc, labels=["model_name"])
        counter.add_metric(labels, read(drafts))
        yield counter
    for name, (doc, read_all) in PLACE_COUNTERS.items():
        counter = CounterMetricFamily(f"perilune:{name}", doc, labels=["model_name", "position"])
        for place, count in enumerate(read_all(drafts)):
            counter.add_metric([*labels, str(place)], count)
        yield counter


def _histogram(name: str, doc: str, data: HistogramData, labels: list[str]) -> Metric:
    family = HistogramMetricFamily(f"perilune:{name}", doc, labels=["model_name"])
    buckets, cumulated = [], 0
    for bound, count in zip([*map(str, data.bounds), "+Inf"], data.counts, strict=True):
        cumulated += count
        buckets.append((bound, cumulated))
    family.add_metric(labels, buckets, data.total)
    return family
