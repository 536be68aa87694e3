"""Notices a step that does not end, and says where it hangs."""

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Sequence

_LOG = logging.getLogger(__name__)
# a step is looked at so many times before it is too long
_LOOKS_PER_TIMEOUT = 8
_LONGEST_PAUSE_S = 5.0


class Watchdog:
    """Looks from a thread of its own at when the running step began (None between steps).

    Of a step that takes longer than `timeout_s` it writes the stacks of all threads to stderr, once, and the requests
    that `request_ids` gives to the log; `complaint` says so until the step ends, and `tell` is called when it changes.
    `on_look` is called every few seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        step_began_s: Callable[[], float | None],
        request_ids: Callable[[], Sequence[str]],
        *,
        tell: Callable[[str | None], None] = lambda _: None,
        on_look: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        dump_stacks: Callable[[], None] = lambda: faulthandler.dump_traceback(all_threads=True),
    ):
        self.complaint: str | None = None
        self._timeout_s = timeout_s
        self._step_began_s = step_began_s
        self._request_ids = request_ids
        self._tell = tell
        self._on_look = on_look
        self._clock = clock
        self._dump_stacks = dump_stacks
        self._reported_s: float | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perilune-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()

    def look(self) -> None:
        """Compare the running step with the limit; called by the thread, and by tests."""
        began_s = self._step_began_s()
        if began_s != self._reported_s and self._reported_s is not None:
            _LOG.warning("the step that was stuck has ended after %.0f s", self._clock() - self._reported_s)
            self._reported_s = self.complaint = None
            self._tell(None)
        if began_s is None or self._reported_s is not None or self._clock() - began_s <= self._timeout_s:
            return
        self._reported_s = began_s
        self.complaint = f"a step of the engine has been running for more than {self._timeout_s:g} s"
        ids = " ".join(self._request_ids())
        _LOG.error("%s; the stacks of all threads follow", self.complaint, extra={"request_id": ids})
        self._dump_stacks()
        self._tell(self.complaint)

    def _run(self) -> None:
        while not self._is_over.wait(min(self._timeout_s / _LOOKS_PER_TIMEOUT, _LONGEST_PAUSE_S)):
            self._on_look()
            self.look()
