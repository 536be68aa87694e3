from perilune.cache.manager import CacheUsage
from perilune.engine.batch import ScheduledBatch
from perilune.engine.request import FinishReason, GenerateRequest, Request
from perilune.engine.stats import EngineStats, Histogram, StatsRecorder
from perilune.sampling.params import SamplingParams

USAGE = CacheUsage(blocks_total=8, blocks_used=3, slots_total=2, slots_used=1)


def test_a_value_on_a_bound_counts_below_it_and_one_above_all_counts_last():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    data = histogram.snapshot()
    assert data.counts == (2, 1, 1)
    assert (data.count, data.total) == (4, 12.0)


def test_a_snapshot_does_not_change_later():
    histogram = Histogram((1.0,))
    before = histogram.snapshot()
    histogram.observe(0.1)
    assert before.count == 0


def test_times_are_taken_between_the_events_of_a_request():
    recorder = StatsRecorder()
    request = Request(GenerateRequest("r", (1, 2), SamplingParams()), 0, arrival_s=10.0, max_total_tokens=9, seed=0)
    sequence = type("Planned", (), {"request": request})
    recorder.on_step(ScheduledBatch((sequence,), num_preempted=2), 11.0)
    for now_s in (13.0, 13.5):
        request.token_ids.append(5)
        recorder.on_token(request, now_s)
    recorder.on_step(ScheduledBatch((sequence,)), 14.0)
    recorder.on_finish(request, FinishReason.STOP, 15.0)
    stats = recorder.snapshot(USAGE, num_running=1, num_waiting=4)
    totals = [
        data.total
        for data in (
            stats.queue_time_s,
            stats.time_to_first_token_s,
            stats.inter_token_latency_s,
            stats.e2e_latency_s,
            stats.prompt_tokens,
            stats.generation_tokens,
        )
    ]
    assert totals == [1.0, 3.0, 0.5, 5.0, 2.0, 2.0]
    assert (stats.num_steps_total, stats.num_preemptions_total) == (2, 2)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (2, 2)
    assert stats.finished_total == {**dict.fromkeys(FinishReason, 0), FinishReason.STOP: 1}
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.slots_used) == (1, 4, 3, 1)


def test_an_engine_that_did_nothing_counts_nothing():
    fresh = StatsRecorder().snapshot(CacheUsage(0, 0, 0, 0), num_running=0, num_waiting=0)
    assert fresh == EngineStats()
