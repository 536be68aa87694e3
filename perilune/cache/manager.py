"""Who holds which part of the cache: for each request one block table, shared by all paged groups, and one slot.

What requests leave behind stays, under the key of the tokens it was made from, until its room is needed; a request
with the same beginning takes it up. Full blocks are shared, the rest is copied, so that nobody writes into what others
read. Knows ids, keys and counts only: what lies behind the ids is storage's business, and when to ask is the
scheduler's.
"""

from dataclasses import dataclass, field

from perilune.cache.blocks import SharedBlocks
from perilune.cache.chain import PrefixChain
from perilune.cache.index import Match, PrefixIndex
from perilune.cache.moves import CopyBlock, CopyState, Move
from perilune.cache.pool import IdPool
from perilune.cache.sealing import SealPolicy


@dataclass(frozen=True)
class CacheUsage:
    """How many blocks and slots there are, are held by requests, and are kept for later ones; and what came of it.

    `tokens_asked` are those of admitted requests that may take up prefixes and `tokens_hit` those they took up;
    `blocks_evicted` and `states_evicted` lost what was kept in them. These four count since the start.
    """

    blocks_total: int
    blocks_used: int
    slots_total: int
    slots_used: int
    blocks_kept: int = 0
    slots_kept: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    blocks_evicted: int = 0
    states_evicted: int = 0


@dataclass(frozen=True)
class Admission:
    """What an admitted request found: its first `num_cached_tokens` tokens need no computing once `moves` are done.

    `seal_positions` are where the state of its prompt is worth keeping, ascending.
    """

    num_cached_tokens: int = 0
    moves: tuple[Move, ...] = ()
    seal_positions: tuple[int, ...] = ()


@dataclass
class _Holding:
    """`seals` are the slots of copies that the running step makes, by position."""

    chain: PrefixChain
    block_ids: list[int]
    slot: int
    num_indexed: int
    seals: dict[int, int] = field(default_factory=dict)


class CacheManager:
    """Grants blocks of `block_size` tokens and state slots to requests, all or nothing.

    With a `policy`, prefixes are kept and taken up; None keeps nothing.
    """

    def __init__(self, *, num_blocks: int, block_size: int, num_slots: int, policy: SealPolicy | None = None):
        self.block_size = block_size
        self._index = PrefixIndex(block_size)
        self._blocks = SharedBlocks(num_blocks, is_named=self._index.holds_block, on_evict=self._forget_block)
        self._slots = IdPool(num_slots)
        self._policy = policy
        self._holdings: dict[str, _Holding] = {}
        self._tokens_asked = self._tokens_hit = self._blocks_evicted = self._states_evicted = 0

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that one request can hold when it is alone."""
        return self._blocks.num_blocks * self.block_size

    def admit(
        self,
        request_id: str,
        chain: PrefixChain,
        *,
        num_spare_blocks: int = 0,
        takes_up: bool = True,
        hints: tuple[int, ...] = (),
    ) -> Admission | None:
        """Give a new request a slot and blocks for the tokens of its chain; None, with nothing changed, when they are
        not there.

        Blocks count as there only if `num_spare_blocks` stay free. One token at least is left to compute. `takes_up`
        False computes all. `hints` are positions where other requests are likely to branch off.
        """
        assert request_id not in self._holdings, f"request {request_id} is admitted twice"
        if self._slots.num_free + self._index.num_states == 0:
            return None
        takes_up = takes_up and self._policy is not None
        match = self._index.match(chain, chain.num_tokens - 1) if takes_up else Match()
        num_new = self._blocks_for(chain.num_tokens) - len(match.full_blocks)
        num_woken = sum(self._blocks.is_kept(block_id) for block_id in match.full_blocks)
        if self._blocks.num_available - num_woken < num_new + num_spare_blocks:
            return None
        self._blocks.hold(match.full_blocks)
        new_blocks, slot = self._blocks.take(num_new), self._take_slot()
        assert new_blocks is not None
        assert slot is not None
        self._holdings[request_id] = _Holding(
            chain, [*match.full_blocks, *new_blocks], slot, num_indexed=len(match.full_blocks)
        )
        if self._policy is None:
            return Admission()
        if takes_up:
            self._tokens_asked += chain.num_tokens
            self._tokens_hit += match.num_tokens
        seals = self._policy.positions(match.num_tokens, match.num_row_tokens, chain.num_tokens, hints)
        return Admission(match.num_tokens, _moves(match, new_blocks, slot), seals)

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Let an admitted request hold `num_tokens` tokens in all; False, with nothing changed, when blocks run out."""
        holding = self._holdings[request_id]
        missing = self._blocks_for(num_tokens) - len(holding.block_ids)
        block_ids = self._blocks.take(max(0, missing))
        if block_ids is None:
            return False
        holding.block_ids.extend(block_ids)
        return True

    def begin_seal(self, request_id: str, position: int) -> int | None:
        """A slot for a copy of the request's state behind `position` tokens, which the next step makes.

        None when there is such a state already, or no room for one.
        """
        slot = self._take_slot() if self.wants_state(request_id, position) else None
        if slot is not None:
            self._holdings[request_id].seals[position] = slot
        return slot

    def wants_state(self, request_id: str, position: int) -> bool:
        """Whether the request's state behind `position` tokens would be kept."""
        holding = self._holdings[request_id]
        return self._policy is not None and position > 0 and not self._index.has_state(holding.chain, position)

    def commit(self, request_id: str, num_tokens: int) -> None:
        """Index what a step has finished of a request: its full blocks up to `num_tokens`, and its seals."""
        if self._policy is None:
            return
        holding = self._holdings[request_id]
        self._add_rows(holding, num_tokens)
        for position, slot in holding.seals.items():
            self._add_state(holding, position, slot)
        holding.seals.clear()

    def release(self, request_id: str, *, keep_state: int = 0) -> None:
        """Free everything that the request holds.

        `keep_state` says that its slot holds the state behind so many tokens, which is wanted and sound.
        """
        holding = self._holdings.pop(request_id)
        self._slots.give_back(list(holding.seals.values()))
        if keep_state:
            self._add_rows(holding, keep_state)
            self._add_state(holding, keep_state, holding.slot)
        else:
            self._slots.give_back([holding.slot])
        self._blocks.give_up(holding.block_ids)

    def discard(self, request_id: str) -> list[int]:
        """Free everything that the request holds, and forget what is kept of any beginning of it.

        Returns the blocks that are free now, which must be erased before anybody gets them.
        """
        holding = self._holdings.pop(request_id)
        self._slots.give_back([holding.slot, *holding.seals.values()])
        forgotten, slots = self._index.drop_chain(holding.chain, holding.chain.num_tokens)
        self._slots.give_back(slots)
        for block_id in holding.block_ids:
            self._slots.give_back(self._index.drop_block(block_id))
        return self._blocks.give_up(holding.block_ids) + self._blocks.free_unnamed(forgotten)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The request's block ids: token position p lies in entry p // block_size."""
        return tuple(self._holdings[request_id].block_ids)

    def state_slot(self, request_id: str) -> int:
        return self._holdings[request_id].slot

    @property
    def usage(self) -> CacheUsage:
        return CacheUsage(
            blocks_total=self._blocks.num_blocks,
            blocks_used=self._blocks.num_held,
            slots_total=self._slots.num_ids,
            slots_used=self._slots.num_used - self._index.num_states,
            blocks_kept=self._blocks.num_kept,
            slots_kept=self._index.num_states,
            tokens_asked=self._tokens_asked,
            tokens_hit=self._tokens_hit,
            blocks_evicted=self._blocks_evicted,
            states_evicted=self._states_evicted,
        )

    def check_integrity(self) -> None:
        """Assert that free, kept and held blocks and slots make up the whole, and that the index agrees."""
        holdings = self._holdings.values()
        self._index.check_integrity()
        self._blocks.check_integrity([holding.block_ids for holding in holdings])
        held = [slot for holding in holdings for slot in (holding.slot, *holding.seals.values())]
        self._slots.check_integrity([*held, *self._index.slots])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take_slot(self) -> int | None:
        """A free slot, else that of the state used least lately."""
        if self._slots.num_free == 0 and self._index.num_states > 0:
            slot, block_id = self._index.drop_oldest_state()
            self._states_evicted += 1
            self._slots.give_back([slot])
            self._blocks.free_unnamed([block_id])
        taken = self._slots.take(1)
        return None if taken is None else taken[0]

    def _forget_block(self, block_id: int) -> None:
        slots = self._index.drop_block(block_id)
        self._blocks_evicted += 1
        self._states_evicted += len(slots)
        self._slots.give_back(slots)

    def _add_rows(self, holding: _Holding, num_tokens: int) -> None:
        while (end := (holding.num_indexed + 1) * self.block_size) <= num_tokens:
            self._index.add_rows(holding.chain, end, holding.block_ids[holding.num_indexed])
            holding.num_indexed += 1

    def _add_state(self, holding: _Holding, position: int, slot: int) -> None:
        """Index a state and the rows that it needs; its slot is free again where there is one already."""
        self._index.add_rows(holding.chain, position, holding.block_ids[(position - 1) // self.block_size])
        if not self._index.add_state(holding.chain, position, slot):
            self._slots.give_back([slot])


def _moves(match: Match, new_blocks: list[int], slot: int) -> tuple[Move, ...]:
    moves: list[Move] = []
    if match.tail_block is not None:
        moves.append(CopyBlock(match.tail_block, new_blocks[0]))
    if match.slot is not None:
        moves.append(CopyState(match.slot, slot))
    return tuple(moves)
