"""Carries objects between the cache's tensors and its tiers: saves at once, loads in the background."""

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue

from perilune.cache.storage import CacheStorage
from perilune.cache.tiers.ledger import Carry, LoadOrder, Transfers
from perilune.cache.tiers.stack import Load, LoadItem, TierStack
from perilune.cache.tiers.store import ObjectKey, Payload, TierStats

_LOG = logging.getLogger(__name__)


class TierTransfers:
    """Does what a ledger ordered: `save` before a step's copies, `start_loads` behind them.

    None of it raises: what cannot be saved is missing later, and a load that cannot begin has failed.
    """

    def __init__(self, storage: CacheStorage, stack: TierStack):
        self._storage = storage
        self._stack = stack
        self._prepared: list[Load] = []
        self._loads: dict[int, Load] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()

    def save(self, transfers: Transfers) -> None:
        """Save what is given up and remove what must go; first secures what is to be loaded."""
        for load_id in transfers.cancelled:
            if load_id in self._loads:
                self._loads[load_id].cancel()
        self._prepared = [self._prepare(order) for order in transfers.loads]
        for key in transfers.removed:
            self._stack.delete(key)
        try:
            for carry in transfers.saves:
                if self._stack.find(carry.key) is None:
                    self._stack.save(carry.key, self._read(carry))
        except MemoryError:
            _LOG.warning("there is no memory to save cached prompts in; lower host_cache_bytes")

    def start_loads(self) -> None:
        """Begin the loads that `save` prepared; from now on their blocks and slots are written to."""
        for load in self._prepared:
            self._stack.start(load)
        self._prepared = []

    def ended(self, wait_s: float) -> list[tuple[int, bool]]:
        """Loads that have ended since the last time, and whether they succeeded; waits for one if there is none yet."""
        found = []
        try:
            found.append(self._ended.get(timeout=wait_s) if wait_s > 0 else self._ended.get_nowait())
            while True:
                found.append(self._ended.get_nowait())
        except Empty:
            return [(load_id, self._loads.pop(load_id).has_succeeded) for load_id in found]

    def stats(self) -> tuple[TierStats, ...]:
        return self._stack.stats()

    def close(self, latest: Iterable[Carry], within_s: float) -> None:
        """Write `latest`, the most valuable first, and what memory holds to the disk tier; then end all tiers."""
        if not self._stack.flush(within_s, self._contents(latest)):
            _LOG.warning("not all cached prompts could be written within %g s", within_s)
        self._stack.close()

    def _prepare(self, order: LoadOrder) -> Load:
        load = self._stack.prepare([LoadItem(item.key, partial(self._write, item)) for item in order.items])
        self._loads[order.load_id] = load
        load.on_done(partial(self._ended.put, order.load_id))
        return load

    def _contents(self, carries: Iterable[Carry]) -> Iterator[tuple[ObjectKey, Payload]]:
        return ((carry.key, self._read(carry)) for carry in carries)

    def _read(self, carry: Carry) -> Payload:
        is_block = carry.key.kind == "block"
        return self._storage.read_block(carry.seat) if is_block else self._storage.read_state(carry.seat)

    def _write(self, carry: Carry, payload: Payload) -> None:
        if carry.key.kind == "block":
            self._storage.write_block(carry.seat, payload)
        else:
            self._storage.write_state(carry.seat, payload)
