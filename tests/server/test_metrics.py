"""Engine counters as Prometheus families."""

from prometheus_client import CollectorRegistry, generate_latest

from perilune.engine.stats import EngineStats, Histogram
from perilune.server.metrics import EngineCollector


def test_buckets_are_cumulative_and_agree_with_count_and_sum():
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.5, 0.6, 7.0):
        histogram.observe(value)
    stats = EngineStats(blocks_total=4, blocks_used=1, time_to_first_token_s=histogram.snapshot())
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: stats, "moon"))
    lines = generate_latest(registry).decode().splitlines()
    name = "perilune:time_to_first_token_seconds"
    assert f'{name}_bucket{{le="0.1",model_name="moon"}} 1.0' in lines
    assert f'{name}_bucket{{le="1.0",model_name="moon"}} 3.0' in lines
    assert f'{name}_bucket{{le="+Inf",model_name="moon"}} 4.0' in lines
    assert f'{name}_count{{model_name="moon"}} 4.0' in lines
    assert f'{name}_sum{{model_name="moon"}} {0.05 + 0.5 + 0.6 + 7.0}' in lines
    assert 'perilune:kv_cache_usage_perc{model_name="moon"} 0.25' in lines
