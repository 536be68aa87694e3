"""Which checkpoint this is: a digest that another model's files do not have, without reading all of them. No torch."""

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from perilune.errors import CheckpointError

_SETTINGS = ("config.json", "preprocessor_config.json")
_SAMPLES_PER_FILE, _SAMPLE_BYTES = 16, 4096


def checkpoint_identity(directory: Path) -> str:
    """A digest of the configuration and of every shard: its name, size, time of change, header, and samples of it.

    A copy made at another time counts as another checkpoint. CheckpointError when a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    try:
        for name in _SETTINGS:
            path = directory / name
            digest.update(_framed(path.read_bytes() if path.exists() else b""))
        for shard in sorted(directory.glob("*.safetensors")):
            status = shard.stat()
            digest.update(_framed(f"{shard.name} {status.st_size} {status.st_mtime_ns}".encode()))
            for sample in _samples(shard, status.st_size):
                digest.update(_framed(sample))
    except OSError as error:
        raise CheckpointError(f"{directory}: {error}; check that this user can read the checkpoint") from error
    return digest.hexdigest()


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def _samples(path: Path, num_bytes: int) -> Iterator[bytes]:
    """Pieces from the beginning, where the header is, to the end of a file."""
    last = max(0, num_bytes - _SAMPLE_BYTES)
    with open(path, "rb") as file:
        for number in range(_SAMPLES_PER_FILE):
            yield os.pread(file.fileno(), _SAMPLE_BYTES, last * number // (_SAMPLES_PER_FILE - 1))
