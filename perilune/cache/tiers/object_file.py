"""One object as a file: a header that says what it is, for which model and settings, and two checksums.

    magic 8 | version 4 | fingerprint 16 | kind 8 | digest 16 | payload bytes 8 | XXH3-128 of the payload 16
    XXH3-64 of all that 8 | payload

little endian. A file appears under its name only when it is whole (it is written beside it and
renamed), and is not synced: what a power failure loses or tears is found by the checksum and is a miss.
"""

import os
import struct
from io import FileIO
from pathlib import Path

import numpy as np
import xxhash

from perilune.cache.tiers.store import ObjectKey, Payload

MAGIC = b"perikv\r\n"
VERSION = 1
TEMPORARY_PREFIX = ".tmp-"

_FIELDS = struct.Struct("<8sI16s8s16sQ16s")
HEADER_BYTES = _FIELDS.size + 8
FINGERPRINT_BYTES = 16


class DamagedFileError(Exception):
    """A file is not the object that its name says."""


def write_object(path: Path, fingerprint: bytes, key: ObjectKey, payload: Payload) -> None:
    """Write an object so that `path` is whole or absent at any time; OSError leaves nothing behind."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        fingerprint,
        key.kind.encode(),
        key.digest,
        payload.nbytes,
        xxhash.xxh3_128_digest(payload),
    )
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for part in (memoryview(fields + xxhash.xxh3_64_digest(fields)), payload):
                _write_all(file, part)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_object(path: Path, fingerprint: bytes, key: ObjectKey) -> Payload:
    """The verified payload of a file; DamagedFileError when it is anything but this object, OSError as it comes."""
    with open(path, "rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size - HEADER_BYTES
        header = file.read(HEADER_BYTES)
        if num_bytes < 0 or len(header) < HEADER_BYTES:
            raise DamagedFileError("it ends within its header")
        fields, checksum = header[: _FIELDS.size], header[_FIELDS.size :]
        if xxhash.xxh3_64_digest(fields) != checksum:
            raise DamagedFileError("its header does not match the header's checksum")
        magic, version, of_fingerprint, kind, digest, length, payload_checksum = _FIELDS.unpack(fields)
        if (magic, version) != (MAGIC, VERSION):
            raise DamagedFileError(f"it is of another format, {magic!r} {version}")
        if of_fingerprint != fingerprint:
            raise DamagedFileError("it is of another model or other settings")
        if (kind.rstrip(b"\0").decode(errors="replace"), digest) != key:
            raise DamagedFileError("it holds another object")
        if length != num_bytes:
            raise DamagedFileError(f"it holds {num_bytes} bytes of {length}")
        payload = np.empty(num_bytes, np.uint8).data
        _read_all(file, payload)
        # what was read is about to be in memory twice; weights that are mapped need the room more
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if xxhash.xxh3_128_digest(payload) != payload_checksum:
        raise DamagedFileError("its payload does not match its checksum")
    return payload.toreadonly()


def _write_all(file: FileIO, part: memoryview) -> None:
    while part:
        part = part[file.write(part) :]


def _read_all(file: FileIO, part: memoryview) -> None:
    while part:
        num_read = file.readinto(part)
        if num_read == 0:
            raise DamagedFileError("it became shorter while it was read")
        part = part[num_read:]
