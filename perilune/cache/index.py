"""Which blocks and slots hold which prefixes: rows under the key of every block, states under that of their position.

A prefix can be taken up only where its rows and its state are all there. Knows keys and ids; who holds a block is the
manager's business.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from perilune.cache.chain import PrefixChain


@dataclass(frozen=True)
class Match:
    """What the index has of a sequence.

    Its first `num_tokens` tokens can be taken up: `full_blocks` hold them but for those of a last block that is not
    full, which lie in `tail_block`, and `slot` holds the state behind them. Rows alone reach to `num_row_tokens`, in
    `row_blocks`.
    """

    num_tokens: int = 0
    full_blocks: tuple[int, ...] = ()
    tail_block: int | None = None
    slot: int | None = None
    num_row_tokens: int = 0
    row_blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Forgotten:
    """What a key no longer finds: the state in `slot`, and the rows in `block_id` if `has_lost_rows`."""

    key: bytes
    block_id: int
    has_lost_rows: bool
    slot: int | None


@dataclass(frozen=True)
class _Rows:
    block_id: int
    parent: bytes
    length: int
    payload: bytes


@dataclass
class PrefixIndex:
    """Rows by key and by block, states by key; the state used last is the last of `_states`."""

    block_size: int
    _rows: dict[bytes, _Rows] = field(default_factory=dict)
    _keys: dict[int, list[bytes]] = field(default_factory=dict)
    # keys of blocks that are not full, under the key of the block before them
    _tails: dict[bytes, dict[bytes, int]] = field(default_factory=dict)
    _states: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    @property
    def num_states(self) -> int:
        return len(self._states)

    @property
    def slots(self) -> list[int]:
        """The slots of all states."""
        return list(self._states.values())

    @property
    def blocks(self) -> list[int]:
        """Every block with a key."""
        return list(self._keys)

    def holds_block(self, block_id: int) -> bool:
        return block_id in self._keys

    def match(self, chain: PrefixChain, limit: int) -> Match:
        """The longest prefix of at most `limit` tokens that can be taken up, which counts as used now."""
        blocks: list[int] = []
        best, best_key = Match(), None
        while True:
            start = len(blocks) * self.block_size
            for tail, length in self._tails.get(chain.key(start), {}).items():
                end = start + length
                if best.num_tokens < end <= limit and tail in self._states and self._is_at(chain, tail, end):
                    best, best_key = Match(end, tuple(blocks), self._rows[tail].block_id, self._states[tail]), tail
            end = start + self.block_size
            key = chain.key(end) if end <= limit else b""
            if not self._is_at(chain, key, end):
                break
            blocks.append(self._rows[key].block_id)
            if key in self._states:
                best, best_key = Match(end, tuple(blocks), None, self._states[key]), key
        if best_key is not None:
            self._states.move_to_end(best_key)
        return replace(best, num_row_tokens=len(blocks) * self.block_size, row_blocks=tuple(blocks))

    def _is_at(self, chain: PrefixChain, key: bytes, end: int) -> bool:
        """Whether the rows under a key are those of the chain up to `end`: its tokens are compared, not only keys."""
        rows = self._rows.get(key)
        return rows is not None and key == chain.key(end) and rows.payload == chain.payload(end)

    def add_rows(self, chain: PrefixChain, end: int, block_id: int) -> None:
        """Index the block that holds the rows up to `end`; what has this key already stays as it is."""
        key = chain.key(end)
        if key in self._rows:
            return
        length = (end - 1) % self.block_size + 1
        parent = chain.key(end - length)
        self._rows[key] = _Rows(block_id, parent, length, chain.payload(end))
        self._keys.setdefault(block_id, []).append(key)
        if length < self.block_size:
            self._tails.setdefault(parent, {})[key] = length

    def has_state(self, chain: PrefixChain, end: int) -> bool:
        return chain.key(end) in self._states

    def add_state(self, chain: PrefixChain, end: int, slot: int) -> bool:
        """Index the state behind `end` tokens, whose rows are indexed; False when there is one already."""
        key = chain.key(end)
        if key in self._states or key not in self._rows:
            return False
        self._states[key] = slot
        return True

    def drop_oldest_state(self) -> Forgotten:
        """Forget the state that was used least lately.

        Rows that end in mid-block are forgotten with their state: they are of no use without it.
        """
        key, slot = next(iter(self._states.items()))
        rows = self._rows[key]
        if rows.length < self.block_size:
            return self._drop(key)
        del self._states[key]
        return Forgotten(key, rows.block_id, False, slot)

    def drop_block(self, block_id: int) -> list[Forgotten]:
        """Forget a block and the states behind its rows."""
        return [self._drop(key) for key in list(self._keys.get(block_id, ()))]

    def drop_chain(self, chain: PrefixChain, num_tokens: int) -> list[Forgotten]:
        """Forget all that lies on the first `num_tokens` tokens of a chain, and what branches off in mid-block."""
        dropped = []
        for start in range(0, num_tokens + 1, self.block_size):
            for key in (chain.key(start), *self._tails.get(chain.key(start), ())):
                if key in self._rows:
                    dropped.append(self._drop(key))
        return dropped

    def states(self) -> Iterator[tuple[bytes, int, int]]:
        """Each state's key and slot, and the tokens before it; the last used first."""
        for key, slot in reversed(self._states.items()):
            rows = self._rows[key]
            num_tokens, parent = rows.length, rows.parent
            while parent in self._rows:
                num_tokens, parent = num_tokens + self._rows[parent].length, self._rows[parent].parent
            yield key, slot, num_tokens

    def snapshots(self) -> Iterator[Forgotten]:
        """What can be taken up, as if it were forgotten: each state with the rows before it, the last used first."""
        seen: set[bytes] = set()
        for state_key, slot in reversed(self._states.items()):
            yield Forgotten(state_key, self._rows[state_key].block_id, state_key not in seen, slot)
            key = self._rows[state_key].parent
            seen.add(state_key)
            while key in self._rows and key not in seen:
                yield Forgotten(key, self._rows[key].block_id, True, None)
                seen.add(key)
                key = self._rows[key].parent

    def _drop(self, key: bytes) -> Forgotten:
        rows = self._rows.pop(key)
        self._keys[rows.block_id].remove(key)
        if not self._keys[rows.block_id]:
            del self._keys[rows.block_id]
        if rows.length < self.block_size:
            del self._tails[rows.parent][key]
            if not self._tails[rows.parent]:
                del self._tails[rows.parent]
        return Forgotten(key, rows.block_id, True, self._states.pop(key, None))

    def check_integrity(self) -> None:
        """Assert that the tables say the same: every key has its rows, every state its rows, every tail its key."""
        assert {key for keys in self._keys.values() for key in keys} == set(self._rows), "a key has no rows"
        assert all(self._rows[key].block_id == block for block, keys in self._keys.items() for key in keys)
        assert set(self._states) <= set(self._rows), "a state has no rows"
        assert len(set(self._states.values())) == len(self._states), "two states lie in one slot"
        tails = {(rows.parent, key) for key, rows in self._rows.items() if rows.length < self.block_size}
        assert {(parent, key) for parent, keys in self._tails.items() for key in keys} == tails
