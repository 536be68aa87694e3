"""Small objects for tests of tiers."""

from hashlib import blake2b
from random import Random

from perilune.cache.tiers.fingerprint import Fingerprint
from perilune.cache.tiers.store import DIGEST_BYTES, ObjectKey

IDENTITY = Fingerprint('{"model": "a"}')
OTHER_IDENTITY = Fingerprint('{"model": "b"}')


def key(number: int, kind: str = "block") -> ObjectKey:
    return ObjectKey(kind, blake2b(str(number).encode(), digest_size=DIGEST_BYTES).digest())


def payload(number: int, num_bytes: int = 1000) -> memoryview:
    """Bytes that only this number has."""
    return memoryview(Random(number).randbytes(num_bytes))


class RecordingStore:
    """A tier in a dict, for the stack above it; `is_broken` makes it fail as a bug would."""

    def __init__(self):
        self.objects = {}
        self.is_broken = False
        self.touched = []

    def has(self, key):
        return key in self.objects

    def get(self, key):
        if self.is_broken:
            raise RuntimeError("broken")
        return self.objects.get(key)

    def put(self, key, payload):
        if self.is_broken:
            raise RuntimeError("broken")
        self.objects[key] = payload
        return True

    def delete(self, key):
        self.objects.pop(key, None)

    def touch(self, keys):
        self.touched += keys

    def size_of(self, payload):
        return payload.nbytes

    def close(self):
        pass
