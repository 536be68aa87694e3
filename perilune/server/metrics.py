"""Prometheus text from the engine's counters, under names shaped as vLLM's so that existing boards map over."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from perilune.engine.stats import EngineStats, HistogramData

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
        finished = CounterMetricFamily(
            "perilune:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.finished_total.items():
            finished.add_metric([*labels, reason.value], count)
        yield finished


def _histogram(name: str, doc: str, data: HistogramData, labels: list[str]) -> Metric:
    family = HistogramMetricFamily(f"perilune:{name}", doc, labels=["model_name"])
    buckets, cumulated = [], 0
    for bound, count in zip([*map(str, data.bounds), "+Inf"], data.counts, strict=True):
        cumulated += count
        buckets.append((bound, cumulated))
    family.add_metric(labels, buckets, data.total)
    return family
