import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perilune.cache.chain import PrefixChain
from perilune.cache.manager import CacheManager, CacheUsage

BLOCK_SIZE = 4


def chain(num_tokens):
    return PrefixChain(range(num_tokens), BLOCK_SIZE)


def test_a_request_gets_blocks_for_its_tokens_and_one_slot():
    manager = CacheManager(num_blocks=10, block_size=BLOCK_SIZE, num_slots=2)
    assert manager.admit("a", chain(5))
    assert len(manager.block_table("a")) == 2
    assert manager.usage == CacheUsage(blocks_total=10, blocks_used=2, slots_total=2, slots_used=1)


def test_extending_keeps_the_blocks_and_adds_only_what_is_missing():
    manager = CacheManager(num_blocks=10, block_size=BLOCK_SIZE, num_slots=1)
    manager.admit("a", chain(5))
    before = manager.block_table("a")
    assert manager.extend("a", 8)
    assert manager.block_table("a") == before
    assert manager.extend("a", 9)
    assert manager.block_table("a")[:2] == before
    assert len(manager.block_table("a")) == 3


def test_a_refusal_changes_nothing():
    manager = CacheManager(num_blocks=3, block_size=BLOCK_SIZE, num_slots=2)
    assert manager.admit("a", chain(8))
    before = manager.usage
    assert not manager.admit("b", chain(5))
    assert not manager.admit("b", chain(4), num_spare_blocks=1)
    assert not manager.extend("a", 13)
    assert manager.usage == before
    assert manager.admit("b", chain(4))
    assert not manager.extend("a", 9)


def test_without_a_free_slot_nothing_is_admitted():
    manager = CacheManager(num_blocks=9, block_size=BLOCK_SIZE, num_slots=1)
    manager.admit("a", chain(1))
    assert not manager.admit("b", chain(1))
    manager.release("a")
    assert manager.admit("b", chain(1))


def test_the_capacity_is_what_an_empty_cache_admits():
    manager = CacheManager(num_blocks=3, block_size=BLOCK_SIZE, num_slots=1)
    assert manager.capacity_tokens == 12
    assert not manager.admit("a", chain(13))
    assert manager.admit("a", chain(12))


def test_a_lost_block_is_caught():
    manager = CacheManager(num_blocks=3, block_size=BLOCK_SIZE, num_slots=1)
    manager.admit("a", chain(5))
    manager._holdings["a"].block_ids.pop()
    with pytest.raises(AssertionError, match="holders"):
        manager.check_integrity()


class ManagerWalk(RuleBasedStateMachine):
    """Random requests against a model that knows only how many tokens each has been promised."""

    def __init__(self):
        super().__init__()
        self.manager = CacheManager(num_blocks=12, block_size=BLOCK_SIZE, num_slots=4)
        self.tokens = {}
        self.num_admitted = 0

    def blocks_of(self, num_tokens):
        return -(-num_tokens // BLOCK_SIZE)

    @property
    def num_free(self):
        return 12 - sum(map(self.blocks_of, self.tokens.values()))

    @rule(num_tokens=st.integers(1, 30), num_spare=st.integers(0, 3))
    def admit(self, num_tokens, num_spare):
        self.num_admitted += 1
        fits = len(self.tokens) < 4 and self.blocks_of(num_tokens) + num_spare <= self.num_free
        request_id = f"r{self.num_admitted}"
        assert (self.manager.admit(request_id, chain(num_tokens), num_spare_blocks=num_spare) is not None) == fits
        if fits:
            self.tokens[request_id] = num_tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_more=st.integers(0, 9))
    def extend(self, data, num_more):
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        wanted = self.tokens[request_id] + num_more
        fits = self.blocks_of(wanted) - self.blocks_of(self.tokens[request_id]) <= self.num_free
        assert self.manager.extend(request_id, wanted) == fits
        if fits:
            self.tokens[request_id] = wanted

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.release(request_id)
        del self.tokens[request_id]

    @invariant()
    def accounts_add_up(self):
        self.manager.check_integrity()
        usage = self.manager.usage
        assert usage.blocks_used == 12 - self.num_free
        assert usage.slots_used == len(self.tokens)

    @invariant()
    def nothing_is_shared(self):
        tables = [self.manager.block_table(request_id) for request_id in self.tokens]
        blocks = [block for table in tables for block in table]
        slots = [self.manager.state_slot(request_id) for request_id in self.tokens]
        assert len(set(blocks)) == len(blocks)
        assert len(set(slots)) == len(slots)
        assert [len(table) for table in tables] == [self.blocks_of(count) for count in self.tokens.values()]


ManagerWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestManagerWalk = ManagerWalk.TestCase
