"""The directory of one fingerprint: which file is which object, who may write there, and what is there at start.

<directory>/<fingerprint>/settings.json          for people who wonder whose files these are
<directory>/<fingerprint>/owner.lock             held by the one process that writes and deletes
<directory>/<fingerprint>/<xx>/<kind>-<digest>   objects, xx the first two digits of the digest
"""

import fcntl
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perilune.cache.tiers.fingerprint import Fingerprint
from perilune.cache.tiers.object_file import HEADER_BYTES, TEMPORARY_PREFIX
from perilune.cache.tiers.store import DIGEST_BYTES, KINDS, ObjectKey
from perilune.errors import ConfigError

_PAGE_BYTES = 4096
_SHARD = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(rf"({'|'.join(KINDS)})-([0-9a-f]{{{2 * DIGEST_BYTES}}})")


@dataclass(frozen=True)
class FoundObject:
    """An object that a scan found, by its name; `used_ns` is when it was last used."""

    key: ObjectKey
    disk_bytes: int
    used_ns: int


@dataclass(frozen=True)
class Scan:
    """What a directory holds, the least recently used first, and how many files in it were no objects."""

    objects: tuple[FoundObject, ...]
    num_damaged: int


def disk_bytes(file_bytes: int) -> int:
    """What a file of this size takes on a disk."""
    return -(-file_bytes // _PAGE_BYTES) * _PAGE_BYTES


class ObjectDirectory:
    """The files of one fingerprint below `directory`, which is made if it is not there.

    Only this user may look inside, for cached rows tell what was said. ConfigError when it cannot be made or read.
    """

    def __init__(self, directory: Path, identity: Fingerprint):
        self.root = directory / identity.digest.hex()
        self._lock_descriptor: int | None = None
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            settings = self.root / "settings.json"
            if not settings.exists():
                settings.write_text(identity.text, encoding="utf-8")
            os.listdir(self.root)
        except OSError as error:
            raise ConfigError(
                f"kv_dir is {str(directory)!r}, which cannot be used ({error}): name a directory that this user can "
                "read and write, or leave kv_dir out"
            ) from error

    def path(self, key: ObjectKey) -> Path:
        name = key.digest.hex()
        return self.root / name[:2] / f"{key.kind}-{name}"

    @property
    def is_owned(self) -> bool:
        """Whether this process may write here."""
        return self._lock_descriptor is not None

    def own(self) -> bool:
        """Become the one that writes here, unless another process or engine is; whether it is so."""
        if self._lock_descriptor is None:
            descriptor = os.open(self.root / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._lock_descriptor = descriptor
        return True

    def disown(self) -> None:
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def scan(self) -> Scan:
        """List the objects by name and size alone; the owner removes what an interrupted writer left."""
        found, num_damaged = [], 0
        for shard in sorted(name for name in os.listdir(self.root) if _SHARD.fullmatch(name)):
            with os.scandir(self.root / shard) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # the owner goes on while another reads
                        item = _found(entry, shard)
                        if item is not None:
                            found.append(item)
                        elif self.is_owned:
                            num_damaged += 1
                            _remove_leftover(entry)
        return Scan(tuple(sorted(found, key=lambda item: item.used_ns)), num_damaged)


def _remove_leftover(entry: os.DirEntry[str]) -> None:
    """Remove a file that this program began; anything else in the directory is somebody's own."""
    is_ours = entry.name.startswith(TEMPORARY_PREFIX) or _OBJECT.fullmatch(entry.name)
    if is_ours and entry.is_file(follow_symlinks=False):
        os.unlink(entry.path)


def _found(entry: os.DirEntry[str], shard: str) -> FoundObject | None:
    """The object that a file is by its name, or None."""
    match = _OBJECT.fullmatch(entry.name)
    if match is None or not match[2].startswith(shard) or not entry.is_file(follow_symlinks=False):
        return None
    status = entry.stat(follow_symlinks=False)
    if status.st_size < HEADER_BYTES:
        return None
    kind = next(kind for kind in KINDS if kind == match[1])
    return FoundObject(ObjectKey(kind, bytes.fromhex(match[2])), disk_bytes(status.st_size), status.st_mtime_ns)
