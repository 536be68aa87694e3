"""What is looked for in tiers, and what is ordered, by keys alone."""

import pytest

from perilune.cache.chain import PrefixChain
from perilune.cache.index import Forgotten, Match
from perilune.cache.tiers.ledger import NUM_BLOCKS_BACK, Carry, TierLedger
from perilune.cache.tiers.store import ObjectKey

BLOCK_SIZE = 4
CHAIN = PrefixChain(list(range(400)), BLOCK_SIZE)


def block(end):
    return ObjectKey("block", CHAIN.key(end))


def state(end):
    return ObjectKey("state", CHAIN.key(end))


def ledger(*keys, tier="disk"):
    return TierLedger(lambda key: tier if key in keys else None, BLOCK_SIZE)


def blocks(first, last):
    return [block(end) for end in range(first, last + 1, BLOCK_SIZE)]


def test_rows_alone_are_of_no_use():
    assert ledger(*blocks(4, 40)).further(CHAIN, 100, Match()) is None


def test_a_state_without_all_rows_before_it_is_of_no_use():
    assert ledger(block(4), block(12), state(12)).further(CHAIN, 100, Match()) is None
    assert ledger(block(4), block(8), state(10)).further(CHAIN, 100, Match()) is None


@pytest.mark.parametrize("end", [1, 3, 4, 5, 8, 11])
def test_the_last_state_with_its_rows_is_found_in_mid_block_and_at_its_end(end):
    keys = [*blocks(4, end), block(end), state(end)]
    found = ledger(*keys, state(1), block(1)).further(CHAIN, 100, Match())
    assert (found.num_tokens, found.num_gained, found.row_blocks) == (end, end, ())
    assert list(found.keys) == [key for number, key in enumerate(keys) if key not in keys[:number]]


def test_one_token_is_left_to_compute():
    tiers = ledger(*blocks(4, 12), state(8), state(12))
    assert tiers.further(CHAIN, 12, Match()).num_tokens == 12
    assert tiers.further(CHAIN, 11, Match()).num_tokens == 8


def test_what_the_cache_has_is_shared_and_only_the_rest_is_loaded():
    match = Match(num_tokens=4, full_blocks=(7,), slot=3, num_row_tokens=12, row_blocks=(7, 8, 9))
    found = ledger(*blocks(16, 20), state(20)).further(CHAIN, 100, match)
    assert (found.num_tokens, found.num_gained, found.row_blocks) == (20, 16, (7, 8, 9))
    assert found.keys == (block(16), block(20), state(20))
    found = ledger(state(8)).further(CHAIN, 100, match)
    assert (found.num_tokens, found.row_blocks, found.keys) == (8, (7, 8), (state(8),))
    found = ledger(state(10), block(10)).further(CHAIN, 100, match)
    assert (found.num_tokens, found.row_blocks, found.keys) == (10, (7, 8), (block(10), state(10)))


@pytest.mark.parametrize("end", [3, 4])
def test_tiers_that_reach_no_further_than_the_cache_are_left_alone(end):
    match = Match(num_tokens=4, full_blocks=(7,), slot=3, num_row_tokens=4, row_blocks=(7,))
    assert ledger(block(end), state(end)).further(CHAIN, 100, match) is None


def test_states_in_mid_block_are_looked_for_near_the_end_of_rows_and_at_block_ends_everywhere():
    last = 40 * BLOCK_SIZE
    far = last - NUM_BLOCKS_BACK * BLOCK_SIZE
    rows = blocks(4, last)
    for end, is_found in ((last + 3, True), (far + 1, True), (far - 1, False), (far - 8, True), (4, True), (3, False)):
        found = ledger(*rows, block(end), state(end)).further(CHAIN, 399, Match())
        assert (found is not None) == is_found, end


def test_what_is_on_its_way_is_known_until_it_has_ended():
    tiers = ledger(*blocks(4, 8), state(8))
    found = tiers.further(CHAIN, 100, Match())
    assert not tiers.is_loading(found)
    number = tiers.begin(found, [5, 6, 9], slot=2)
    assert tiers.is_loading(found)
    transfers = tiers.drain()
    assert transfers.loads[0].items == (Carry(block(4), 5), Carry(block(8), 6), Carry(state(8), 2))
    assert not tiers.drain()
    assert tiers.end(number, has_succeeded=True) == found
    assert not tiers.is_loading(found)
    assert tiers.tokens_loaded == {"host": 0, "disk": 8}


def test_a_failed_load_counts_no_tokens():
    tiers = ledger(block(4), state(4), tier="host")
    tiers.end(tiers.begin(tiers.further(CHAIN, 100, Match()), [0], slot=0), has_succeeded=False)
    assert tiers.tokens_loaded == {"host": 0, "disk": 0}


def test_what_was_forgotten_is_saved_under_its_own_key():
    tiers = ledger()
    tiers.save([Forgotten(b"a", 1, True, 2), Forgotten(b"b", 3, False, 4), Forgotten(b"c", 5, True, None)])
    expected = {(("state", b"a"), 2), (("block", b"a"), 1), (("state", b"b"), 4), (("block", b"c"), 5)}
    assert {(tuple(carry.key), carry.seat) for carry in tiers.drain().saves} == expected


def test_a_chain_that_is_removed_is_not_found_again_before_it_is_gone():
    tiers = ledger(*blocks(4, 8), state(7), block(7), state(8))
    tiers.remove(CHAIN, 8)
    assert tiers.further(CHAIN, 100, Match()) is None
    assert set(tiers.drain().removed) == {*blocks(4, 8), state(7), block(7), state(8)}
