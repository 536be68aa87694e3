"""Writes objects to a slow tier in the background, and never makes anybody wait for it."""

import logging
import threading
import time
from collections import OrderedDict

from perilune.cache.tiers.store import ObjectKey, ObjectStore, Payload

_LOG = logging.getLogger(__name__)


class BackgroundWriter:
    """A queue of at most `max_bytes` before one thread that puts objects into `store`.

    What does not fit is dropped, which makes it a miss later; an empty queue takes one object of any size. What waits
    can still be had. The writer owns the store's writing side; `close` does not close the store.
    """

    def __init__(self, store: ObjectStore, max_bytes: int):
        self._store = store
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._queue: OrderedDict[ObjectKey, Payload] = OrderedDict()
        self._bytes_waiting = 0
        self._is_closed = False
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="kv-tier-writer", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """How many objects found the queue full."""
        return self._num_dropped

    @property
    def bytes_waiting(self) -> int:
        return self._bytes_waiting

    def offer(self, key: ObjectKey, payload: Payload) -> bool:
        """Queue an object; False when it is dropped. Never waits."""
        with self._changed:
            return self._accept(key, payload)

    def put(self, key: ObjectKey, payload: Payload, deadline_s: float) -> bool:
        """Queue an object as soon as there is room for it; False when there is none by `deadline_s` (monotonic)."""
        with self._changed:
            is_there = self._changed.wait_for(lambda: self._has_room(payload), _time_to(deadline_s))
            return is_there and self._accept(key, payload)

    def waiting(self, key: ObjectKey) -> Payload | None:
        """An object that is queued or being written."""
        with self._changed:
            return self._queue.get(key)

    def discard(self, key: ObjectKey) -> None:
        """Take an object out of the queue; waits while it is being written."""
        with self._changed:
            if key in self._queue and next(iter(self._queue)) == key:
                self._changed.wait_for(lambda: key not in self._queue)
            self._remove(key)

    def flush(self, deadline_s: float) -> bool:
        """Wait until all that was queued is written, at most until `deadline_s` (monotonic); whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, _time_to(deadline_s))

    def close(self) -> None:
        """Stop after the object that is being written; what waits is dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout=10.0)

    def _accept(self, key: ObjectKey, payload: Payload) -> bool:
        if key in self._queue:
            return True
        if self._is_closed or not self._has_room(payload):
            self._num_dropped += 1
            return False
        self._queue[key] = payload
        self._bytes_waiting += payload.nbytes
        self._changed.notify_all()
        return True

    def _has_room(self, payload: Payload) -> bool:
        return not self._queue or self._bytes_waiting + payload.nbytes <= self._max_bytes

    def _remove(self, key: ObjectKey) -> None:
        payload = self._queue.pop(key, None)
        if payload is not None:
            self._bytes_waiting -= payload.nbytes
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
                # it stays in the queue while it is written, so that it can be had all the time
                key, payload = next(iter(self._queue.items()))
            try:
                self._store.put(key, payload)
            except Exception:
                _LOG.exception("a cached prompt could not be written")
            with self._changed:
                self._remove(key)


def _time_to(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
