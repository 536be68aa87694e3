"""What every tier is: a store of finished bytes under keys that say what the bytes are.

Keys are content addresses, so an object never changes and two copies of it are as good as one. A store of another kind,
a shared one on other machines included, only has to keep this protocol. Knows no tensors, blocks or requests.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

Kind = Literal["block", "state"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DIGEST_BYTES = 16

# Contiguous bytes that nobody changes once they were handed over.
Payload = memoryview


class ObjectKey(NamedTuple):
    """Which object: the rows of one block or the state of one position, `digest` naming all tokens up to its end."""

    kind: Kind
    digest: bytes


@dataclass(frozen=True)
class TierStats:
    """What one tier holds, and what became of everything that was asked of it since it was opened.

    `num_refused` counts objects that were offered and not kept, `num_damaged` files that were not what they claim,
    `num_failed` reads and writes that the system refused.
    """

    name: str
    num_objects: int
    bytes_used: int
    budget_bytes: int
    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    num_damaged: int = 0
    num_failed: int = 0


class ObjectStore(Protocol):
    """One tier. Safe to call from several threads; nothing here raises for what a disk or a network does."""

    def has(self, key: ObjectKey) -> bool:
        """Whether `get` would probably find it; cheap, touches no disk."""

    def get(self, key: ObjectKey) -> Payload | None:
        """The object, verified, now the most recently used; None when it is not there or cannot be had."""

    def put(self, key: ObjectKey, payload: Payload) -> bool:
        """Keep an object, at the cost of those least recently used; whether it is kept."""

    def delete(self, key: ObjectKey) -> None:
        """Forget an object, if it is there."""

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        """Make those objects that are there the most recently used, the last the most of all."""

    def size_of(self, payload: Payload) -> int:
        """What an object takes of the budget, in bytes."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Give up threads, files and locks; what a durable store holds stays."""
