"""Blocks that several requests may hold at once, and that stay as they are, after the last has gone, while they have a
name. Counts holders; knows neither names nor owners."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from perilune.cache.pool import IdPool


class SharedBlocks:
    """Blocks are free, held by one request or more, or kept: named, held by none, and evicted when room is needed.

    `is_named(block)` says whether a block is worth keeping; `on_evict(block)` is called when a kept one is taken.
    """

    def __init__(self, num_blocks: int, *, is_named: Callable[[int], bool], on_evict: Callable[[int], None]):
        self._pool = IdPool(num_blocks)
        self._is_named = is_named
        self._on_evict = on_evict
        self._num_holders = [0] * num_blocks
        # the one used least lately first; of one request the last block first, so that no block outlives its parent
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return self._pool.num_ids

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_held(self) -> int:
        return self._pool.num_used - len(self._kept)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        return self._pool.num_free + len(self._kept)

    def is_kept(self, block_id: int) -> bool:
        return block_id in self._kept

    def take(self, count: int) -> list[int] | None:
        """`count` blocks held once, free ones first; None, with nothing changed, when fewer can be taken."""
        if count > self.num_available:
            return None
        while self._pool.num_free < count:
            block_id, _ = self._kept.popitem(last=False)
            self._on_evict(block_id)
            self._pool.give_back([block_id])
        taken = self._pool.take(count)
        assert taken is not None
        for block_id in taken:
            self._num_holders[block_id] = 1
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Hold once more blocks that are held or kept."""
        for block_id in block_ids:
            self._kept.pop(block_id, None)
            self._num_holders[block_id] += 1

    def give_up(self, block_ids: Sequence[int]) -> list[int]:
        """Hold blocks, in the order of a request's table, once less; returns those that are free now."""
        freed: list[int] = []
        for block_id in reversed(block_ids):
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                if self._is_named(block_id):
                    self._kept[block_id] = None
                else:
                    freed.append(block_id)
        self._pool.give_back(freed)
        return freed

    def free_unnamed(self, block_ids: Iterable[int]) -> list[int]:
        """Free those of these blocks that are kept and have lost their name, and return them."""
        freed = [block_id for block_id in set(block_ids) if block_id in self._kept and not self._is_named(block_id)]
        for block_id in freed:
            del self._kept[block_id]
        self._pool.give_back(freed)
        return freed

    def check_integrity(self, holdings: Iterable[Sequence[int]]) -> None:
        """Assert that free, kept and held blocks make up the whole, and that `holdings` are all holders there are."""
        holders = Counter(block_id for block_ids in holdings for block_id in block_ids)
        for block_id, count in enumerate(self._num_holders):
            assert count == holders[block_id], f"block {block_id} has {holders[block_id]} holders and counts {count}"
        assert not any(holders[block_id] for block_id in self._kept), "a kept block is held"
        assert all(self._is_named(block_id) for block_id in self._kept), "a block without a name is kept"
        self._pool.check_integrity([*self._kept, *holders])
