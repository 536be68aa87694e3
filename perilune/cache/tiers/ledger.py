"""What the tiers have of a sequence beyond the cache's own blocks and slots, and what is to be carried up and down.

Keeps ids, keys and counts; the runner carries the bytes, in the order saves, copies, loads: what is given up is read
before anything is written, and a load begins where nothing is read any more.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from perilune.cache.chain import PrefixChain
from perilune.cache.index import Forgotten, Match
from perilune.cache.tiers.stack import TierName
from perilune.cache.tiers.store import ObjectKey

# States in mid-block are looked for in so many blocks back from where the rows end: prompts go on from there.
NUM_BLOCKS_BACK = 8


@dataclass(frozen=True)
class Carry:
    """An object and the block or slot that it lies in, or shall lie in."""

    key: ObjectKey
    seat: int


@dataclass(frozen=True)
class LoadOrder:
    """Objects to be loaded, all or none."""

    load_id: int
    items: tuple[Carry, ...]


@dataclass(frozen=True)
class Transfers:
    """What a step carries: `saves` before it copies or computes anything, `loads` begun behind its copies.

    `cancelled` are loads nobody waits for any more, `removed` objects that no tier may keep.
    """

    saves: tuple[Carry, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    cancelled: tuple[int, ...] = ()
    removed: tuple[ObjectKey, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.cancelled or self.removed)


@dataclass(frozen=True)
class Further:
    """How far a sequence could be taken up with what tiers have: `num_tokens`, `num_gained` more than without.

    `row_blocks` are in the cache; the blocks behind them and the state have to be loaded.
    """

    num_tokens: int
    row_blocks: tuple[int, ...]
    block_keys: tuple[ObjectKey, ...]
    state_key: ObjectKey
    num_gained: int

    @property
    def keys(self) -> tuple[ObjectKey, ...]:
        return (*self.block_keys, self.state_key)


@dataclass(frozen=True)
class _Loading:
    further: Further
    tier: TierName


@dataclass
class TierLedger:
    """Looks tiers up with `find` and collects what is to be carried until it is drained.

    `tokens_loaded` counts the tokens that need no computing thanks to a tier; the slowest that had a part counts.
    """

    find: Callable[[ObjectKey], TierName | None]
    block_size: int
    _saves: list[Carry] = field(default_factory=list)
    _loads: list[LoadOrder] = field(default_factory=list)
    _cancelled: list[int] = field(default_factory=list)
    _removed: set[ObjectKey] = field(default_factory=set)
    _loading: dict[int, _Loading] = field(default_factory=dict)
    _num_begun: int = 0
    tokens_loaded: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})

    @property
    def num_loads(self) -> int:
        """Loads that have not ended, cancelled ones too."""
        return len(self._loading)

    def _where(self, key: ObjectKey) -> TierName | None:
        return None if key in self._removed else self.find(key)

    def save(self, forgotten: Iterable[Forgotten]) -> None:
        """Have what the cache gives up saved."""
        self._saves += carries(forgotten)

    def further(self, chain: PrefixChain, limit: int, match: Match) -> Further | None:
        """What tiers add to `match` up to `limit` tokens; None where they add nothing."""
        end = match.num_row_tokens
        while end + self.block_size <= limit and self._where(_block(chain, end + self.block_size)):
            end += self.block_size
        for position in self._candidates(end, match.num_tokens, limit):
            if self._is_there(chain, position):
                return self._found(chain, position, match)
        return None

    def _candidates(self, end: int, known: int, limit: int) -> Iterator[int]:
        """Positions above `known` where a state may be, the last first: any near the `end` of rows, then block ends."""
        near = max(known, end - NUM_BLOCKS_BACK * self.block_size)
        yield from range(min(limit, end + self.block_size - 1), near, -1)
        yield from range(near // self.block_size * self.block_size, known, -self.block_size)

    def _is_there(self, chain: PrefixChain, position: int) -> bool:
        """Whether the state behind `position` tokens is in a tier, and its rows too where they end in mid-block."""
        if self._where(_state(chain, position)) is None:
            return False
        return position % self.block_size == 0 or self._where(_block(chain, position)) is not None

    def _found(self, chain: PrefixChain, position: int, match: Match) -> Further:
        row_blocks = match.row_blocks[: position // self.block_size]
        ends = range((len(row_blocks) + 1) * self.block_size, position + self.block_size, self.block_size)
        keys = tuple(_block(chain, min(end, position)) for end in ends)
        return Further(position, row_blocks, keys, _state(chain, position), position - match.num_tokens)

    def is_loading(self, further: Further) -> bool:
        """Whether any of it is on its way already."""
        under_way = {key for loading in self._loading.values() for key in loading.further.keys}
        return any(key in under_way for key in further.keys)

    def begin(self, further: Further, block_ids: Sequence[int], slot: int) -> int:
        """Have it loaded into these blocks, which come behind `row_blocks`, and this slot; returns a number for it."""
        self._num_begun += 1
        seats = [*block_ids[: len(further.block_keys)], slot]
        items = tuple(Carry(key, seat) for key, seat in zip(further.keys, seats, strict=True))
        self._loads.append(LoadOrder(self._num_begun, items))
        is_slow = any(self._where(key) == "disk" for key in further.keys)
        self._loading[self._num_begun] = _Loading(further, "disk" if is_slow else "host")
        return self._num_begun

    def cancel(self, load_id: int) -> None:
        """Nobody waits for this load any more; its seats are in use until it has ended."""
        self._cancelled.append(load_id)

    def end(self, load_id: int, has_succeeded: bool) -> Further:
        """Note that nobody writes into the seats of a load any more; returns what it was for."""
        loading = self._loading.pop(load_id)
        if has_succeeded:
            self.tokens_loaded[loading.tier] += loading.further.num_gained
        return loading.further

    def remove(self, chain: PrefixChain, num_tokens: int) -> None:
        """Have all objects along a chain removed."""
        keys = (key(chain, end) for end in range(1, num_tokens + 1) for key in (_block, _state))
        self._removed.update(key for key in keys if self._where(key) is not None)

    def drain(self) -> Transfers:
        """What is to be carried since the last time."""
        transfers = Transfers(tuple(self._saves), tuple(self._loads), tuple(self._cancelled), tuple(self._removed))
        for kept in (self._saves, self._loads, self._cancelled):
            kept.clear()
        self._removed.clear()
        return transfers


def carries(forgotten: Iterable[Forgotten]) -> list[Carry]:
    """The objects that are lost with it."""
    found = []
    for item in forgotten:
        if item.slot is not None:
            found.append(Carry(ObjectKey("state", item.key), item.slot))
        if item.has_lost_rows:
            found.append(Carry(ObjectKey("block", item.key), item.block_id))
    return found


def _block(chain: PrefixChain, end: int) -> ObjectKey:
    return ObjectKey("block", chain.key(end))


def _state(chain: PrefixChain, end: int) -> ObjectKey:
    return ObjectKey("state", chain.key(end))
