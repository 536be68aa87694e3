"""How many requests may wait, and when one that was refused should come again."""

import time
from collections import deque
from collections.abc import Callable
from math import ceil

from perilune.errors import RequestError

# The pace is that of the latest so many requests that left the queue.
WINDOW = 32


class Gate:
    """Refuses requests beyond `max_waiting` that would have to wait; None lets all of them in.

    Between two steps of the engine it counts what came in, and takes those for which a seat was free as running. Not
    safe to call from several threads at once.
    """

    def __init__(self, max_num_seqs: int, max_waiting: int | None, *, clock: Callable[[], float] = time.monotonic):
        self.num_rejected = 0
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._clock = clock
        self._num_arriving = 0
        self._num_waiting = 0
        self._num_running = 0
        self._num_started = 0
        self._began_s = clock()
        self._starts: deque[float] = deque()
        self._next_s = 0.0

    def check(self) -> None:
        """RequestError, status 429, when the next request would have to wait and the queue is full."""
        if self._max_waiting is None:
            return
        num_seats = self._max_num_seqs - self._num_running if self._num_waiting == 0 else 0
        num_waiting = self._num_waiting + self._num_arriving - num_seats
        # below zero seats are free, and one more is taken by the newcomer itself
        if num_waiting < 0 or num_waiting < self._max_waiting:
            return
        self.num_rejected += 1
        retry_after_s = self._retry_after_s()
        raise RequestError(
            f"the queue is full: {num_waiting} requests wait and --max-waiting is {self._max_waiting}; "
            f"try again in {retry_after_s} s",
            status=429,
            code="rate_limit_exceeded",
            retry_after_s=retry_after_s,
        )

    def enter(self) -> None:
        """Count a request that is on its way to the engine; raises as `check`."""
        self.check()
        self._num_arriving += 1

    def take_back(self) -> None:
        """Forget a request that was on its way and never reached the engine."""
        self._num_arriving -= 1

    def on_turn(self, *, num_taken: int, num_running: int, num_waiting: int, num_started: int) -> None:
        """Learn what the engine has after a step: of those on the way it took `num_taken`.

        `num_started` counts the requests that ever left the queue to run.
        """
        now_s = self._clock()
        if self._num_waiting == 0 or num_waiting == 0:
            # the queue begins here at the earliest, and whoever started took a free seat
            self._began_s = now_s
            self._starts.clear()
        else:
            self._starts.extend([now_s] * (num_started - self._num_started))
        self._num_arriving -= num_taken
        self._num_running, self._num_waiting, self._num_started = num_running, num_waiting, num_started
        while len(self._starts) > WINDOW:
            self._began_s = self._starts.popleft()

    def _retry_after_s(self) -> int:
        """Whole seconds until a place is free that nobody was promised, at the pace of the queue.

        The pace is taken since the queue began, so that it slows down while nothing leaves. Each one that is refused is
        promised a later place, up to the time when all who wait now have left.
        """
        assert self._max_waiting is not None
        now_s = self._clock()
        pace_s = (now_s - self._began_s) / max(1, len(self._starts))
        self._next_s = min(max(self._next_s, now_s) + pace_s, now_s + pace_s * (self._max_waiting + 1))
        return max(1, ceil(self._next_s - now_s))
