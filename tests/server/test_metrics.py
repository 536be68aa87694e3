"""Engine counters as Prometheus families."""

from prometheus_client import CollectorRegistry, generate_latest

from perilune.engine.stats import DraftStats, EngineStats, Histogram, TierStats
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


def test_tiers_have_a_value_each():
    tiers = (
        TierStats("host", num_objects=3, bytes_used=30, budget_bytes=100, num_hits=7),
        TierStats("disk", num_objects=4, bytes_used=40, budget_bytes=200, num_damaged=1),
    )
    stats = EngineStats(tiers=tiers, tier_tokens_hit_total={"host": 64, "disk": 0})
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: stats, "moon"))
    lines = generate_latest(registry).decode().splitlines()
    assert 'perilune:kv_tier_objects{model_name="moon",tier="host"} 3.0' in lines
    assert 'perilune:kv_tier_used_bytes{model_name="moon",tier="disk"} 40.0' in lines
    assert 'perilune:kv_tier_hits_total{model_name="moon",tier="host"} 7.0' in lines
    assert 'perilune:kv_tier_damaged_total{model_name="moon",tier="disk"} 1.0' in lines
    assert 'perilune:prefix_cache_tier_hits_total{model_name="moon",tier="host"} 64.0' in lines


def test_guesses_are_counted_in_all_and_by_place():
    drafts = DraftStats(tried=(10, 8), kept=(8, 3), num_rounds=10, num_drafted=20, num_steps=40, num_plain_steps=30)
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: EngineStats(drafts=drafts), "moon"))
    lines = generate_latest(registry).decode().splitlines()
    assert 'perilune:spec_decode_num_drafts_total{model_name="moon"} 10.0' in lines
    assert 'perilune:spec_decode_num_draft_tokens_total{model_name="moon"} 20.0' in lines
    assert 'perilune:spec_decode_num_accepted_tokens_total{model_name="moon"} 11.0' in lines
    assert 'perilune:spec_decode_plain_steps_total{model_name="moon"} 30.0' in lines
    assert 'perilune:spec_decode_num_reached_tokens_per_pos_total{model_name="moon",position="1"} 8.0' in lines
    assert 'perilune:spec_decode_num_accepted_tokens_per_pos_total{model_name="moon",position="1"} 3.0' in lines


def test_an_engine_that_guesses_nothing_has_no_counts_of_it():
    registry = CollectorRegistry()
    registry.register(EngineCollector(EngineStats, "moon"))
    assert b"spec_decode" not in generate_latest(registry)
