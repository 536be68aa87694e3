"""Who holds which part of the cache: for each request one block table, shared by all paged groups, and one slot.

What requests leave behind stays, under the key of the tokens it was made from, until its room is needed; a request
with the same beginning takes it up. Full blocks are shared, the rest is copied, so that nobody writes into what others
read. Knows ids, keys and counts only: what lies behind the ids is storage's business, and when to ask is the
scheduler's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from perilune.cache.blocks import SharedBlocks
from perilune.cache.chain import PrefixChain
from perilune.cache.index import Forgotten, Match, PrefixIndex
from perilune.cache.moves import CopyBlock, CopyState, Move
from perilune.cache.pool import IdPool
from perilune.cache.sealing import SealPolicy
from perilune.cache.tiers.ledger import Carry, Further, TierLedger, Transfers, carries


@dataclass(frozen=True)
class CacheUsage:
    """How many blocks and slots there are, are held by requests, and are kept for later ones; and what came of it.

    `tokens_asked` are those of admitted requests that may take up prefixes and `tokens_hit` those they took up;
    `blocks_evicted` and `states_evicted` lost what was kept in them. These four count since the start, and so do
    `tier_tokens_hit`, those tokens taken up that had to be loaded, by the tier that they came from.
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
    tier_tokens_hit: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Admission:
    """What an admitted request found: its first `num_cached_tokens` tokens need no computing once `moves` are done.

    `seal_positions` are where the state of its prompt is worth keeping, ascending. With a `load_id` it has to wait for
    the end of this load. `is_deferred` says that nothing was granted: what it needs is being loaded for another.
    """

    num_cached_tokens: int = 0
    moves: tuple[Move, ...] = ()
    seal_positions: tuple[int, ...] = ()
    load_id: int | None = None
    is_deferred: bool = False


@dataclass(frozen=True)
class KeptState:
    """The state behind the first `num_tokens` tokens of some request, by the name of these tokens."""

    key: str
    slot: int
    num_tokens: int


@dataclass
class _Holding:
    """`seals` are the slots of copies that the running step makes, by position; `load_id` is that of a load into it."""

    chain: PrefixChain
    block_ids: list[int]
    slot: int
    num_indexed: int
    seals: dict[int, int] = field(default_factory=dict)
    load_id: int | None = None


class CacheManager:
    """Grants blocks of `block_size` tokens and state slots to requests, all or nothing.

    With a `policy`, prefixes are kept and taken up; None keeps nothing. With a `ledger`, what is given up is saved in
    tiers, and loaded again.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        policy: SealPolicy | None = None,
        ledger: TierLedger | None = None,
    ):
        assert policy is not None or ledger is None, "tiers keep prefixes"
        self.block_size = block_size
        self._index = PrefixIndex(block_size)
        self._blocks = SharedBlocks(num_blocks, is_named=self._index.holds_block, on_evict=self._forget_block)
        self._slots = IdPool(num_slots)
        self._policy = policy
        self._ledger = ledger
        self._holdings: dict[str, _Holding] = {}
        # requests by the load they wait for, and what loads write to that nobody waits for
        self._awaiting: dict[int, str] = {}
        self._abandoned: dict[int, _Holding] = {}
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
        loads: bool = True,
        hints: tuple[int, ...] = (),
    ) -> Admission | None:
        """Give a new request a slot and blocks for the tokens of its chain; None, with nothing changed, when they are
        not there.

        Blocks count as there only if `num_spare_blocks` stay free. One token at least is left to compute. `takes_up`
        False computes all, `loads` False leaves tiers out. `hints` are positions where other requests are likely to
        branch off.
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
        further = None
        if takes_up and loads and self._ledger is not None:
            further = self._ledger.further(chain, chain.num_tokens - 1, match)
            if further is not None and self._ledger.is_loading(further):
                return Admission(is_deferred=True)
        shared = match.full_blocks if further is None else further.row_blocks
        self._blocks.hold(shared)
        new_blocks, slot = self._blocks.take(self._blocks_for(chain.num_tokens) - len(shared)), self._take_slot()
        assert new_blocks is not None
        assert slot is not None
        holding = _Holding(chain, [*shared, *new_blocks], slot, num_indexed=len(shared))
        self._holdings[request_id] = holding
        if self._policy is None:
            return Admission()
        num_cached = match.num_tokens if further is None else further.num_tokens
        seals = self._policy.positions(num_cached, match.num_row_tokens, chain.num_tokens, hints)
        if further is not None:
            return Admission(num_cached, (), seals, self._begin_load(request_id, holding, further, new_blocks))
        if takes_up:
            self._count_hit(chain.num_tokens, num_cached)
        return Admission(num_cached, _moves(match, new_blocks, slot), seals)

    def _begin_load(self, request_id: str, holding: _Holding, further: Further, new_blocks: list[int]) -> int:
        assert self._ledger is not None
        holding.load_id = self._ledger.begin(further, new_blocks, holding.slot)
        self._awaiting[holding.load_id] = request_id
        return holding.load_id

    def end_load(
        self, load_id: int, has_succeeded: bool, is_sound: Callable[[int], bool] = lambda _: True
    ) -> tuple[str | None, tuple[Move, ...]]:
        """Take over what was loaded; returns the request that waited for it, or None if it is gone, and what is to be
        copied so that the state that it takes up, if it `is_sound` in its slot, stays for others too.

        After a failure the request holds nothing.
        """
        assert self._ledger is not None
        further = self._ledger.end(load_id, has_succeeded)
        request_id, moves = self._awaiting.pop(load_id, None), tuple[Move, ...]()
        if request_id is None:
            self._give_back(self._abandoned.pop(load_id))
        elif not has_succeeded:
            self._give_back(self._holdings.pop(request_id))
        else:
            holding = self._holdings[request_id]
            holding.load_id = None
            self._count_hit(holding.chain.num_tokens, further.num_tokens)
            self._add_rows(holding, further.num_tokens)
            if is_sound(holding.slot):
                moves = self._keep_loaded(request_id, holding, further.num_tokens)
        return request_id, moves

    def _keep_loaded(self, request_id: str, holding: _Holding, num_tokens: int) -> tuple[Move, ...]:
        """Index a copy of the state behind the tokens that were loaded, where there is room for one."""
        slot = self._take_slot() if self.wants_state(request_id, num_tokens) else None
        if slot is None:
            return ()
        self._add_state(holding, num_tokens, slot)
        return (CopyState(holding.slot, slot),)

    def abandon(self, request_id: str) -> None:
        """Free what a request that waits for a load holds, as soon as the load writes no more."""
        holding = self._holdings.pop(request_id)
        assert self._ledger is not None
        assert holding.load_id is not None, f"request {request_id} waits for no load"
        self._ledger.cancel(holding.load_id)
        del self._awaiting[holding.load_id]
        self._abandoned[holding.load_id] = holding

    @property
    def num_loads(self) -> int:
        """Loads that have not ended; what they write to is held."""
        return len(self._awaiting) + len(self._abandoned)

    def drain_transfers(self) -> Transfers:
        """What is to be carried between the cache and its tiers by the next step."""
        return Transfers() if self._ledger is None else self._ledger.drain()

    def snapshots(self) -> Iterator[Carry]:
        """What is worth saving when the engine ends, the most valuable first; each object once."""
        for forgotten in self._index.snapshots():
            yield from carries([forgotten])

    def num_kept_tokens(self, chain: PrefixChain) -> int:
        """How many tokens of a chain a request could take up now, tiers left out."""
        return 0 if self._policy is None else self._index.match(chain, chain.num_tokens - 1).num_tokens

    def kept_states(self, most: int) -> list[KeptState]:
        """The `most` states used last of those that wait for a request with the same beginning."""
        return [KeptState(key.hex(), slot, count) for key, slot, count in islice(self._index.states(), most)]

    def extend(self, request_id: str, num_tokens: int, *, num_spare_blocks: int = 0) -> bool:
        """Let an admitted request hold `num_tokens` tokens in all; False, with nothing changed, when blocks run out.

        Blocks that are missing count as there only if `num_spare_blocks` stay free.
        """
        holding = self._holdings[request_id]
        missing = self._blocks_for(num_tokens) - len(holding.block_ids)
        if missing > 0 and self._blocks.num_available < missing + num_spare_blocks:
            return False
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
        forgotten = self._index.drop_chain(holding.chain, holding.chain.num_tokens)
        for block_id in holding.block_ids:
            forgotten += self._index.drop_block(block_id)
        self._free_slots(forgotten)
        if self._ledger is not None:
            self._ledger.remove(holding.chain, holding.chain.num_tokens)
        unnamed = [item.block_id for item in forgotten]
        return self._blocks.give_up(holding.block_ids) + self._blocks.free_unnamed(unnamed)

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
            tier_tokens_hit={} if self._ledger is None else dict(self._ledger.tokens_loaded),
        )

    def check_integrity(self) -> None:
        """Assert that free, kept and held blocks and slots make up the whole, and that the index agrees."""
        holdings = [*self._holdings.values(), *self._abandoned.values()]
        self._index.check_integrity()
        assert self.num_loads == (0 if self._ledger is None else self._ledger.num_loads), "a load is lost"
        self._blocks.check_integrity([holding.block_ids for holding in holdings])
        held = [slot for holding in holdings for slot in (holding.slot, *holding.seals.values())]
        self._slots.check_integrity([*held, *self._index.slots])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take_slot(self) -> int | None:
        """A free slot, else that of the state used least lately."""
        if self._slots.num_free == 0 and self._index.num_states > 0:
            forgotten = self._index.drop_oldest_state()
            self._evict([forgotten])
            self._blocks.free_unnamed([forgotten.block_id])
        taken = self._slots.take(1)
        return None if taken is None else taken[0]

    def _forget_block(self, block_id: int) -> None:
        self._blocks_evicted += 1
        self._evict(self._index.drop_block(block_id))

    def _evict(self, forgotten: list[Forgotten]) -> None:
        """Give up the states of what was forgotten, and have it saved."""
        if self._ledger is not None:
            self._ledger.save(forgotten)
        self._states_evicted += sum(item.slot is not None for item in forgotten)
        self._free_slots(forgotten)

    def _free_slots(self, forgotten: Iterable[Forgotten]) -> None:
        self._slots.give_back([item.slot for item in forgotten if item.slot is not None])

    def _give_back(self, holding: _Holding) -> None:
        self._slots.give_back([holding.slot])
        self._blocks.give_up(holding.block_ids)

    def _count_hit(self, num_asked: int, num_hit: int) -> None:
        self._tokens_asked += num_asked
        self._tokens_hit += num_hit

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
