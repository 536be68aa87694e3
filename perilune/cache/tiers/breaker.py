"""When to leave a failing tier alone, and when to try it again."""

import logging
import threading
import time
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class Breaker:
    """After each failure in a row a longer pause, from `FIRST_PAUSE_S` doubling to `LONGEST_PAUSE_S`, then one try.

    `what` names the activity in the log, which has one line when it starts to fail and one when it works again.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic):
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._num_in_a_row = 0
        self._closed_until_s = 0.0
        self.num_failed = 0

    @property
    def allows(self) -> bool:
        return self._num_in_a_row == 0 or self._clock() >= self._closed_until_s

    def failed(self, error: Exception) -> None:
        with self._lock:
            self.num_failed += 1
            self._num_in_a_row += 1
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_in_a_row - 1, 30))
            self._closed_until_s = self._clock() + pause_s
            is_first = self._num_in_a_row == 1
        if is_first:
            _LOG.warning("%s fails (%s); it is left out and tried again now and then", self._what, error)

    def succeeded(self) -> None:
        if self._num_in_a_row == 0:
            return
        with self._lock:
            num_failures, self._num_in_a_row = self._num_in_a_row, 0
        _LOG.warning("%s works again after %d failures", self._what, num_failures)
