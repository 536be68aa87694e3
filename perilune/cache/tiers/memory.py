"""Objects in host memory: a budget of bytes, the least recently used going first, to the next tier if there is one."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from perilune.cache.tiers.store import ObjectKey, Payload, TierStats


class MemoryTier:
    """Keeps at most `budget_bytes` of payloads; `spill` gets every object that has to leave, or finds no room.

    A pinned object does not leave while it is being read: it counts in the budget and stands outside the order.
    """

    def __init__(self, budget_bytes: int, spill: Callable[[ObjectKey, Payload], object] | None = None):
        self._budget_bytes = budget_bytes
        self._spill = spill
        self._lock = threading.Lock()
        self._order: OrderedDict[ObjectKey, Payload] = OrderedDict()
        self._pinned: dict[ObjectKey, tuple[Payload, int]] = {}
        self._bytes_used = 0
        self._num_hits = self._num_misses = self._num_stored = self._num_evicted = self._num_refused = 0

    def has(self, key: ObjectKey) -> bool:
        with self._lock:
            return key in self._order or key in self._pinned

    def get(self, key: ObjectKey) -> Payload | None:
        payload = self.pin(key)
        if payload is not None:
            self.unpin(key)
        return payload

    def pin(self, key: ObjectKey) -> Payload | None:
        """The object, which stays until as many `unpin`; None, with nothing pinned, when it is not there."""
        with self._lock:
            payload, num_pins = self._pinned.get(key, (None, 0))
            if payload is None:
                payload = self._order.pop(key, None)
            if payload is None:
                self._num_misses += 1
                return None
            self._num_hits += 1
            self._pinned[key] = payload, num_pins + 1
            return payload

    def unpin(self, key: ObjectKey) -> None:
        """Undo one `pin`; after the last the object is the most recently used, unless it was deleted meanwhile."""
        with self._lock:
            payload, num_pins = self._pinned.pop(key, (None, 0))
            if payload is None:
                return
            if num_pins > 1:
                self._pinned[key] = payload, num_pins - 1
            else:
                self._order[key] = payload

    def put(self, key: ObjectKey, payload: Payload) -> bool:
        with self._lock:
            if key in self._pinned:
                return True
            if key in self._order:
                self._order.move_to_end(key)
                return True
            leaving, is_kept = self._make_room(payload.nbytes)
            if is_kept:
                self._order[key] = payload
                self._bytes_used += payload.nbytes
                self._num_stored += 1
            else:
                self._num_refused += 1
                leaving.append((key, payload))
        if self._spill is not None:
            for item in leaving:
                self._spill(*item)
        return is_kept

    def delete(self, key: ObjectKey) -> None:
        """Forget an object; whoever pinned it keeps the bytes."""
        with self._lock:
            payload, _ = self._pinned.pop(key, (self._order.pop(key, None), 0))
            if payload is not None:
                self._bytes_used -= payload.nbytes

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        with self._lock:
            for key in keys:
                if key in self._order:
                    self._order.move_to_end(key)

    def size_of(self, payload: Payload) -> int:
        return payload.nbytes

    def contents(self) -> list[tuple[ObjectKey, Payload]]:
        """All objects, the least recently used first."""
        with self._lock:
            return [*self._order.items(), *((key, payload) for key, (payload, _) in self._pinned.items())]

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name="host",
                num_objects=len(self._order) + len(self._pinned),
                bytes_used=self._bytes_used,
                budget_bytes=self._budget_bytes,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_stored=self._num_stored,
                num_evicted=self._num_evicted,
                num_refused=self._num_refused,
            )

    def close(self) -> None:
        with self._lock:
            self._order.clear()
            self._bytes_used = sum(payload.nbytes for payload, _ in self._pinned.values())

    def _make_room(self, num_bytes: int) -> tuple[list[tuple[ObjectKey, Payload]], bool]:
        """Objects that left so that `num_bytes` fit, and whether they do; nothing leaves where it would not help."""
        pinned_bytes = sum(payload.nbytes for payload, _ in self._pinned.values())
        if num_bytes > self._budget_bytes - pinned_bytes:
            return [], False
        leaving = []
        while self._bytes_used + num_bytes > self._budget_bytes:
            item = self._order.popitem(last=False)
            self._bytes_used -= item[1].nbytes
            self._num_evicted += 1
            leaving.append(item)
        return leaving, True
