import pytest

from perilune.engine.policy.gate import WINDOW, Gate
from perilune.errors import RequestError


class Queue:
    """A gate before an engine of `num_seats`, in which requests wait and start as the test says."""

    def __init__(self, num_seats, max_waiting):
        self.now_s = 100.0
        self.gate = Gate(num_seats, max_waiting, clock=lambda: self.now_s)
        self.num_arriving = self.num_waiting = self.num_running = self.num_started = 0

    def enter(self, count=1):
        for _ in range(count):
            self.gate.enter()
            self.num_arriving += 1

    def turn(self, *, starts=0, ends=0, after_s=0.0):
        """The engine takes what has come, starts some and ends some."""
        self.now_s += after_s
        taken, self.num_arriving = self.num_arriving, 0
        self.num_waiting += taken - starts
        self.num_running += starts - ends
        self.num_started += starts
        self.gate.on_turn(
            num_taken=taken,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_started=self.num_started,
        )

    def refusal(self):
        with pytest.raises(RequestError) as caught:
            self.gate.enter()
        return caught.value


def test_without_a_limit_nothing_is_refused():
    queue = Queue(2, None)
    queue.enter(1000)
    queue.turn(starts=2)
    queue.enter(1000)


@pytest.mark.parametrize("max_waiting", [0, 3])
def test_a_burst_on_an_idle_engine_takes_the_seats_and_the_places(max_waiting):
    queue = Queue(4, max_waiting)
    queue.enter(4 + max_waiting)
    error = queue.refusal()
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert f"{max_waiting} requests wait and --max-waiting is {max_waiting}" in str(error)
    assert queue.gate.num_rejected == 1


def test_places_are_counted_over_steps_and_free_again_when_requests_start():
    queue = Queue(4, 3)
    queue.enter(5)
    queue.turn(starts=4)
    queue.enter(2)
    queue.refusal()
    queue.turn()
    queue.refusal()
    queue.turn(ends=2, starts=2)
    queue.enter(2)
    queue.refusal()


def test_seats_do_not_count_while_others_wait_for_room_in_the_cache():
    queue = Queue(8, 2)
    queue.enter(4)
    queue.turn(starts=2)
    queue.refusal()


def test_a_check_alone_takes_no_place():
    queue = Queue(1, 1)
    for _ in range(5):
        queue.gate.check()
    queue.enter(2)
    queue.refusal()


def test_the_time_to_come_again_is_that_of_the_next_place_at_the_pace_of_the_queue():
    queue = Queue(1, 4)
    queue.enter(5)
    queue.turn(starts=1)
    for _ in range(3):
        queue.turn(starts=1, ends=1, after_s=4.0)
        queue.enter()
    assert queue.refusal().retry_after_s == 4


def test_each_refusal_is_promised_a_later_place_until_all_who_wait_will_be_gone():
    queue = Queue(1, 4)
    queue.enter(5)
    queue.turn(starts=1)
    queue.turn(starts=1, ends=1, after_s=3.0)
    queue.enter()
    assert [queue.refusal().retry_after_s for _ in range(7)] == [3, 6, 9, 12, 15, 15, 15]


def test_the_time_grows_while_nothing_leaves_the_queue():
    queue = Queue(1, 1)
    queue.enter(2)
    queue.turn(starts=1)
    queue.turn(after_s=20.0)
    assert queue.refusal().retry_after_s == 20
    queue.turn(after_s=30.0)
    assert queue.refusal().retry_after_s >= 50


def test_the_pace_is_that_of_the_latest_requests_and_is_forgotten_when_the_queue_is_empty():
    queue = Queue(1, 500)
    queue.enter(201)
    queue.turn(starts=1)
    for _ in range(50):
        queue.turn(starts=1, ends=1, after_s=60.0)
    for _ in range(WINDOW):
        queue.turn(starts=1, ends=1, after_s=2.0)
    queue.enter(500 - queue.num_waiting)
    assert queue.refusal().retry_after_s == 2
    queue.turn()
    while queue.num_waiting:
        queue.turn(starts=1, ends=1, after_s=2.0)
    queue.turn(after_s=1000.0)
    queue.enter(500)
    assert queue.refusal().retry_after_s == 1
