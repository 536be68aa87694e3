"""Objects on disk: a budget of bytes in a directory that the next start finds again.

Nothing read is believed before its checksum. Whatever the disk does is a miss: failures are counted, and reading and
writing are left out for a while, each by itself.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from perilune.cache.tiers.breaker import Breaker
from perilune.cache.tiers.directory import ObjectDirectory, disk_bytes
from perilune.cache.tiers.fingerprint import Fingerprint
from perilune.cache.tiers.object_file import HEADER_BYTES, DamagedFileError, read_object, write_object
from perilune.cache.tiers.store import ObjectKey, Payload, TierStats

_LOG = logging.getLogger(__name__)

SCAN_WAIT_S = 5.0
RETRY_OWNING_S = 5.0


class DiskTier:
    """Keeps at most `budget_bytes` on disk below `directory`, the least recently used files going first.

    One process owns a directory of one fingerprint; another with the same fingerprint reads what was there when it
    started, writes nothing, and takes over when the owner is gone. Opening waits `SCAN_WAIT_S` at most for the list of
    files; until the list is there, everything is a miss. ConfigError when the directory cannot be used at all.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        identity: Fingerprint,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._directory = ObjectDirectory(directory, identity)
        self._fingerprint = identity.digest
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._reading = Breaker(f"reading cached prompts from {directory}", clock)
        self._writing = Breaker(f"writing cached prompts to {directory}", clock)
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._index: OrderedDict[ObjectKey, int] = OrderedDict()
        self._bytes_used = 0
        self._next_owning_s = 0.0
        self._last_used_ns = 0
        self._is_listed = self._is_closed = False
        self._num_hits = self._num_misses = self._num_stored = 0
        self._num_evicted = self._num_refused = self._num_damaged = 0
        self._opening = threading.Thread(target=self._open, name="kv-dir-scan", daemon=True)
        self._opening.start()
        self._opening.join(SCAN_WAIT_S)

    @property
    def is_owner(self) -> bool:
        """Whether this tier writes; one that does not only reads."""
        return self._directory.is_owned

    def has(self, key: ObjectKey) -> bool:
        return self._reading.allows and key in self._index

    def get(self, key: ObjectKey) -> Payload | None:
        payload = self._read(key) if self.has(key) else None
        with self._lock:
            self._num_hits += payload is not None
            self._num_misses += payload is None
        return payload

    def put(self, key: ObjectKey, payload: Payload) -> bool:
        with self._write_lock:
            is_kept = self._may_write() and self._write(key, payload)
        if not is_kept:
            with self._lock:
                self._num_refused += 1
        return is_kept

    def delete(self, key: ObjectKey) -> None:
        if self._forget(key) and self.is_owner:
            self._unlink(key)

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._touch(key)

    def size_of(self, payload: Payload) -> int:
        return disk_bytes(HEADER_BYTES + payload.nbytes)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name="disk",
                num_objects=len(self._index),
                bytes_used=self._bytes_used,
                budget_bytes=self._budget_bytes,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_stored=self._num_stored,
                num_evicted=self._num_evicted,
                num_refused=self._num_refused,
                num_damaged=self._num_damaged,
                num_failed=self._reading.num_failed + self._writing.num_failed,
            )

    def close(self) -> None:
        with self._write_lock:
            self._is_closed = True
            self._directory.disown()

    def _open(self) -> None:
        """Own the directory if it is free, and list it."""
        try:
            if not self._directory.own():
                _LOG.warning(
                    "%s belongs to another process: cached prompts are read from it and not written",
                    self._directory.root,
                )
            self._list()
        except OSError as error:
            self._reading.failed(error)

    def _list(self) -> None:
        """Take what is there for the index, and remove what is beyond the budget."""
        scan = self._directory.scan()
        with self._lock:
            self._index = OrderedDict((item.key, item.disk_bytes) for item in scan.objects)
            self._bytes_used = sum(self._index.values())
            self._num_damaged += scan.num_damaged
            self._is_listed = True
        if self.is_owner:
            self._make_room(0)

    def _may_write(self) -> bool:
        """Whether this process writes now; one that does not own the directory tries to, every few seconds."""
        if self._is_closed or not self._is_listed or not self._writing.allows:
            return False
        if self.is_owner:
            return True
        if self._clock() < self._next_owning_s:
            return False
        self._next_owning_s = self._clock() + RETRY_OWNING_S
        try:
            if self._directory.own():
                _LOG.warning("%s is free: cached prompts are written there from now on", self._directory.root)
                self._list()
        except OSError as error:
            self._writing.failed(error)
        return self.is_owner

    def _read(self, key: ObjectKey) -> Payload | None:
        try:
            payload = read_object(self._directory.path(key), self._fingerprint, key)
        except FileNotFoundError:
            self._forget(key)
            return None
        except DamagedFileError as damage:
            _LOG.warning("%s is ignored: %s", self._directory.path(key), damage)
            with self._lock:
                self._num_damaged += 1
            self.delete(key)
            return None
        except OSError as error:
            self._reading.failed(error)
            return None
        self._reading.succeeded()
        self._touch(key)
        return payload

    def _touch(self, key: ObjectKey) -> bool:
        """Make an object the most recently used, for the next start too; whether it is there."""
        with self._lock:
            if key not in self._index:
                return False
            self._index.move_to_end(key)
        if self.is_owner:
            try:
                self._stamp(self._directory.path(key))
            except FileNotFoundError:
                self._forget(key)
                return False
            except OSError as error:
                self._writing.failed(error)
        return True

    def _write(self, key: ObjectKey, payload: Payload) -> bool:
        if self._touch(key):
            return True
        num_bytes, path = self.size_of(payload), self._directory.path(key)
        if num_bytes > self._budget_bytes:
            return False
        try:
            self._make_room(num_bytes)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_object(path, self._fingerprint, key, payload)
            self._stamp(path)
        except OSError as error:
            self._writing.failed(error)
            return False
        with self._lock:
            self._index[key] = num_bytes
            self._bytes_used += num_bytes
            self._num_stored += 1
        self._writing.succeeded()
        return True

    def _stamp(self, path: Path) -> None:
        """Note that a file is used now, later than any other: the clock of file systems is too coarse for that."""
        with self._lock:
            self._last_used_ns = max(time.time_ns(), self._last_used_ns + 1)
            used_ns = self._last_used_ns
        os.utime(path, ns=(used_ns, used_ns))

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used files until `num_bytes` more fit the budget."""
        while True:
            with self._lock:
                if self._bytes_used + num_bytes <= self._budget_bytes:
                    return
                key = next(iter(self._index))
            self._directory.path(key).unlink(missing_ok=True)
            self._forget(key)
            self._num_evicted += 1

    def _forget(self, key: ObjectKey) -> bool:
        with self._lock:
            num_bytes = self._index.pop(key, 0)
            self._bytes_used -= num_bytes
            return num_bytes > 0

    def _unlink(self, key: ObjectKey) -> None:
        try:
            self._directory.path(key).unlink(missing_ok=True)
        except OSError as error:
            self._writing.failed(error)
