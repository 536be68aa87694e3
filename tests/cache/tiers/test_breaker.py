import logging

from perilune.cache.tiers.breaker import LONGEST_PAUSE_S, Breaker


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_failure_stops_the_activity_for_a_second_and_each_further_one_twice_as_long():
    clock = Clock()
    breaker = Breaker("reading", clock)
    assert breaker.allows
    for pause_s in (1.0, 2.0, 4.0):
        breaker.failed(OSError("no"))
        clock.now_s += 0.99 * pause_s
        assert not breaker.allows
        clock.now_s += 0.02 * pause_s
        assert breaker.allows
    breaker.succeeded()
    breaker.failed(OSError("no"))
    clock.now_s += 1.0
    assert breaker.allows
    assert breaker.num_failed == 4


def test_the_pause_never_grows_beyond_its_bound():
    clock = Clock()
    breaker = Breaker("reading", clock)
    for _ in range(2000):
        breaker.failed(OSError("no"))
    clock.now_s += LONGEST_PAUSE_S
    assert breaker.allows


def test_the_log_has_one_line_when_it_begins_to_fail_and_one_when_it_works_again(caplog):
    breaker = Breaker("reading from /x", Clock())
    with caplog.at_level(logging.WARNING):
        breaker.succeeded()
        for _ in range(5):
            breaker.failed(OSError("no such device"))
        breaker.succeeded()
        breaker.succeeded()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("reading from /x fails (no such device)")
    assert second == "reading from /x works again after 5 failures"
