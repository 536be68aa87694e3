import pytest

from perilune.cache.pool import IdPool


def test_ids_are_handed_out_once_each_and_can_be_taken_again():
    pool = IdPool(5)
    first, rest = pool.take(2), pool.take(3)
    assert sorted(first + rest) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.give_back(first)
    assert sorted(pool.take(2)) == sorted(first)


def test_taking_more_than_is_free_takes_nothing():
    pool = IdPool(3)
    assert pool.take(4) is None
    assert pool.num_free == 3


def test_freeing_twice_is_caught():
    pool = IdPool(3)
    ids = pool.take(2)
    pool.give_back(ids)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back(ids)


def test_a_lost_a_doubled_and_a_free_id_are_caught():
    pool = IdPool(4)
    first, second = pool.take(2)
    pool.check_integrity([first, second])
    with pytest.raises(AssertionError, match="in use"):
        pool.check_integrity([first])
    with pytest.raises(AssertionError, match="held twice"):
        pool.check_integrity([first, first])
    with pytest.raises(AssertionError, match="is free"):
        pool.check_integrity([first, 3])
