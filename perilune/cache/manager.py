"""Who holds which part of the cache: for each request one block table, shared by all paged groups, and one slot.

Knows ids and counts only. What lies behind the ids is storage's business, and when to ask is the scheduler's.
"""

from dataclasses import dataclass

from perilune.cache.pool import IdPool


@dataclass(frozen=True)
class CacheUsage:
    """How many blocks and slots there are and are held."""

    blocks_total: int
    blocks_used: int
    slots_total: int
    slots_used: int


@dataclass
class _Holding:
    block_ids: list[int]
    slot: int


class CacheManager:
    """Grants blocks of `block_size` tokens and state slots to requests, all or nothing."""

    def __init__(self, *, num_blocks: int, block_size: int, num_slots: int):
        self.block_size = block_size
        self._blocks = IdPool(num_blocks)
        self._slots = IdPool(num_slots)
        self._holdings: dict[str, _Holding] = {}

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that one request can hold when it is alone."""
        return self._blocks.num_ids * self.block_size

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` cached tokens fits when it is alone."""
        return num_tokens <= self.capacity_tokens and self._slots.num_ids > 0

    def admit(self, request_id: str, num_tokens: int, *, num_spare_blocks: int = 0) -> bool:
        """Give a new request a slot and blocks for `num_tokens`; False, with nothing changed, when they are not there.

        Blocks count as there only if `num_spare_blocks` stay free.
        """
        assert request_id not in self._holdings, f"request {request_id} is admitted twice"
        num_blocks = self._blocks_for(num_tokens)
        if self._slots.num_free == 0 or self._blocks.num_free < num_blocks + num_spare_blocks:
            return False
        slots, block_ids = self._slots.take(1), self._blocks.take(num_blocks)
        assert slots is not None
        assert block_ids is not None
        self._holdings[request_id] = _Holding(block_ids, slots[0])
        return True

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Let an admitted request hold `num_tokens` tokens in all; False, with nothing changed, when blocks run out."""
        holding = self._holdings[request_id]
        missing = self._blocks_for(num_tokens) - len(holding.block_ids)
        block_ids = self._blocks.take(max(0, missing))
        if block_ids is None:
            return False
        holding.block_ids.extend(block_ids)
        return True

    def release(self, request_id: str) -> None:
        """Free everything that the request holds."""
        holding = self._holdings.pop(request_id)
        self._blocks.give_back(holding.block_ids)
        self._slots.give_back([holding.slot])

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The request's block ids: token position p lies in entry p // block_size."""
        return tuple(self._holdings[request_id].block_ids)

    def state_slot(self, request_id: str) -> int:
        return self._holdings[request_id].slot

    @property
    def usage(self) -> CacheUsage:
        return CacheUsage(
            blocks_total=self._blocks.num_ids,
            blocks_used=self._blocks.num_used,
            slots_total=self._slots.num_ids,
            slots_used=self._slots.num_used,
        )

    def check_integrity(self) -> None:
        """Assert that free and held blocks and slots make up the whole, each once."""
        holdings = self._holdings.values()
        self._blocks.check_integrity([block_id for holding in holdings for block_id in holding.block_ids])
        self._slots.check_integrity([holding.slot for holding in holdings])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
