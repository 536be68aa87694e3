from perilune.bench.parallel.sums import SIZES, SumTiming, bench_sums


def test_both_ways_are_timed_at_both_sizes():
    timings = bench_sums()
    assert [timing.num_bytes for timing in timings] == [14336, 1048576] == list(SIZES)
    for timing in timings:
        assert 0 < timing.shared_memory_least_s <= timing.shared_memory_s
        assert 0 < timing.gloo_least_s <= timing.gloo_s


def test_the_ratio_is_of_medians():
    assert SumTiming(1, 2.0, 1.0, 30.0, 10.0).as_json()["ratio"] == 15.0
