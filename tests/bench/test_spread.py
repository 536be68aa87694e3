import pytest

from perilune.bench.spread import Spread, time_calls


def test_a_spread_is_a_median_between_the_extremes():
    assert Spread.of([3.0, 1.0, 2.0, 9.0]) == Spread(2.5, 1.0, 9.0)


@pytest.fixture
def watch():
    """Calls that take known times by a clock of their own."""

    class Watch:
        now = 0.0
        order: list[int]

        def __init__(self):
            self.order = []

        def call(self, index, seconds):
            def run():
                self.order.append(index)
                self.now += seconds

            return run

        def clock(self):
            return self.now

    return Watch()


def test_calls_take_turns_and_the_first_runs_once_untimed(watch):
    calls = [watch.call(0, 100.0), watch.call(1, 1.0), watch.call(2, 2.0)]
    found = time_calls(calls, enough_s=0.0, fewest=2, clock=watch.clock)
    assert watch.order == [0, 1, 2]
    assert found == Spread(1.5, 1.0, 2.0)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"enough_s": 5.0, "fewest": 1}, 5),
        ({"enough_s": 0.0, "fewest": 3}, 3),
        ({"enough_s": 9.0, "fewest": 1, "most": 4, "longest_s": 9.0}, 4),
        ({"enough_s": 9.0, "fewest": 9, "longest_s": 2.0}, 2),
    ],
)
def test_it_stops_when_enough_time_or_calls_have_passed(watch, limits, expected):
    time_calls([watch.call(0, 1.0)], clock=watch.clock, **limits)
    assert len(watch.order) == expected + 1
