"""The tiers below the cache's own blocks and slots: host memory first, then what outlives the process."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from perilune.cache.tiers.memory import MemoryTier
from perilune.cache.tiers.store import ObjectKey, ObjectStore, Payload, TierStats
from perilune.cache.tiers.writer import BackgroundWriter

_LOG = logging.getLogger(__name__)

TierName = Literal["host", "disk"]

# Twice this is the most that objects on their way between memory and a slow tier take, but for one object of any size.
WRITE_QUEUE_BYTES = 256 * 2**20
NUM_LOADERS = 2


@dataclass(frozen=True)
class LoadItem:
    """An object to be loaded and what takes its bytes, on a thread of the loader's."""

    key: ObjectKey
    place: Callable[[Payload], None]


class Load:
    """A load on its way. Until `is_done` somebody may be writing to the places of its items, cancelled or not."""

    def __init__(self, items: Sequence[LoadItem]) -> None:
        self.items = items
        self.pinned: dict[ObjectKey, Payload] = {}
        self._future: Future[bool] = Future()
        self._cancelled = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    @property
    def has_succeeded(self) -> bool:
        """Whether every item is in its place; only once it is done."""
        return self._future.done() and self._future.result()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Have it end soon, in failure unless it has ended; returns at once."""
        self._cancelled.set()

    def on_done(self, call: Callable[[], None]) -> None:
        """Call from the loader's thread at the end, or at once when it is over."""
        self._future.add_done_callback(lambda _: call())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; `has_succeeded`, TimeoutError when it takes longer."""
        return self._future.result(timeout_s)

    def finish(self, has_succeeded: bool) -> None:
        """For the loader: nobody writes any more."""
        self._future.set_result(has_succeeded)


class TierStack:
    """Where objects go when the cache lets go of them, and where they are found again.

    `memory` and `slow` may each be None; with both None nothing is ever found. Objects move down: memory spills to
    `slow` through a bounded queue, and what is loaded stays where it is. No method but `delete`, `flush` and `close`
    waits for a disk; none raises for what a tier does.
    """

    def __init__(
        self,
        host_bytes: int = 0,
        slow: ObjectStore | None = None,
        *,
        queue_bytes: int = WRITE_QUEUE_BYTES,
    ):
        self._slow = slow
        self._writer = None if slow is None else BackgroundWriter(slow, queue_bytes)
        spill = None if self._writer is None else self._writer.offer
        self._memory = MemoryTier(host_bytes, spill) if host_bytes > 0 else None
        self._loaders = ThreadPoolExecutor(NUM_LOADERS, thread_name_prefix="kv-tier-loader")

    @property
    def is_empty(self) -> bool:
        """Whether there is no tier at all, so that saving would be for nothing."""
        return self._memory is None and self._slow is None

    def find(self, key: ObjectKey) -> TierName | None:
        """Where an object could be had from."""
        if self._memory is not None and self._memory.has(key):
            return "host"
        if self._writer is not None and self._writer.waiting(key) is not None:
            return "host"
        return "disk" if self._slow is not None and self._slow.has(key) else None

    def save(self, key: ObjectKey, payload: Payload) -> None:
        """Keep an object if there is room for it anywhere."""
        if self._memory is not None:
            self._memory.put(key, payload)
        elif self._writer is not None:
            self._writer.offer(key, payload)

    def delete(self, key: ObjectKey) -> None:
        """Forget an object everywhere; a load that is under way may still bring it."""
        if self._memory is not None:
            self._memory.delete(key)
        if self._writer is not None:
            self._writer.discard(key)
        if self._slow is not None:
            self._slow.delete(key)

    def prepare(self, items: Sequence[LoadItem]) -> Load:
        """A load of all of these objects or none; what memory holds of them stays there until its end."""
        load = Load(items)
        if self._memory is not None:
            for item in items:
                payload = None if item.key in load.pinned else self._memory.pin(item.key)
                if payload is not None:
                    load.pinned[item.key] = payload
        return load

    def start(self, load: Load) -> None:
        """Begin a load, in the background."""
        self._loaders.submit(self._run, load)

    def flush(self, within_s: float, latest: Iterable[tuple[ObjectKey, Payload]] = ()) -> bool:
        """Write `latest`, the most valuable first, and then what memory holds to the slow tier.

        Returns whether it was done in time; without a slow tier there is nothing to do.
        """
        if self._writer is None or self._slow is None:
            return True
        deadline_s = time.monotonic() + within_s
        keys = []
        is_complete = True
        for key, payload in self._worth_writing(self._slow, latest):
            if not self._writer.put(key, payload, deadline_s):
                is_complete = False
                break
            keys.append(key)
        is_complete = self._writer.flush(deadline_s) and is_complete
        self._slow.touch(reversed(keys))
        return is_complete

    def stats(self) -> tuple[TierStats, ...]:
        """Of each tier, the fastest first; what found the queue to a tier full counts as refused by it."""
        found = [] if self._memory is None else [self._memory.stats()]
        if self._slow is not None and self._writer is not None:
            slow = self._slow.stats()
            found.append(replace(slow, num_refused=slow.num_refused + self._writer.num_dropped))
        return tuple(found)

    def close(self) -> None:
        """End loads and writing; what was not flushed and is in memory is lost."""
        self._loaders.shutdown(wait=True, cancel_futures=False)
        if self._writer is not None:
            self._writer.close()
        for tier in (self._memory, self._slow):
            if tier is not None:
                tier.close()

    def _worth_writing(
        self, slow: ObjectStore, latest: Iterable[tuple[ObjectKey, Payload]]
    ) -> Iterator[tuple[ObjectKey, Payload]]:
        """`latest` and what memory holds, the most recently used first, as far as `slow` could hold it all."""
        room = slow.stats().budget_bytes
        held = [] if self._memory is None else self._memory.contents()
        for key, payload in chain(latest, reversed(held)):
            room -= slow.size_of(payload)
            if room < 0:
                return
            yield key, payload

    def _run(self, load: Load) -> None:
        has_succeeded = False
        try:
            has_succeeded = all(self._place(load, item) for item in load.items)
        except Exception:
            _LOG.exception("a cached prompt could not be loaded")
        finally:
            self._settle(load)
            load.finish(has_succeeded)

    def _settle(self, load: Load) -> None:
        """Let go of what was loaded, its end first: a prompt's beginning is of use to more, and stays longer."""
        keys = [item.key for item in reversed(load.items)]
        if self._memory is not None:
            for key in keys:
                if load.pinned.pop(key, None) is not None:
                    self._memory.unpin(key)
        if self._slow is not None:
            self._slow.touch(keys)

    def _place(self, load: Load, item: LoadItem) -> bool:
        if load.is_cancelled:
            return False
        payload = load.pinned.get(item.key)
        if payload is None and self._writer is not None:
            payload = self._writer.waiting(item.key)
        if payload is None and self._slow is not None:
            payload = self._slow.get(item.key)
        if payload is None:
            return False
        item.place(payload)
        return True
