from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.cache.tiers.memory import MemoryTier
from tests.cache.tiers.objects import key, payload


def test_the_least_recently_used_objects_leave_for_the_next_tier_when_room_is_needed():
    spilled = []
    tier = MemoryTier(3000, lambda key, payload: spilled.append((key, payload)))
    for number in range(3):
        assert tier.put(key(number), payload(number))
    tier.get(key(0))
    assert tier.put(key(3), payload(3))
    assert spilled == [(key(1), payload(1))]
    assert [number for number in range(4) if tier.has(key(number))] == [0, 2, 3]


def test_an_object_larger_than_the_budget_goes_straight_to_the_next_tier_and_nothing_leaves_for_it():
    spilled = []
    tier = MemoryTier(3000, lambda key, payload: spilled.append(key))
    tier.put(key(0), payload(0))
    assert not tier.put(key(1), payload(1, 3001))
    assert spilled == [key(1)]
    assert tier.has(key(0))
    assert tier.stats().num_refused == 1


def test_a_pinned_object_stays_and_keeps_its_room_until_its_last_pin_is_gone():
    tier = MemoryTier(2000)
    tier.put(key(0), payload(0))
    assert tier.pin(key(0)) == tier.pin(key(0)) == payload(0)
    tier.put(key(1), payload(1))
    tier.unpin(key(0))
    tier.put(key(2), payload(2))
    assert tier.has(key(0))
    assert not tier.has(key(1))
    assert not tier.put(key(3), payload(3, 1001))
    tier.unpin(key(0))
    assert tier.put(key(3), payload(3, 2000))
    assert tier.stats().bytes_used == 2000
    assert not tier.has(key(0))


def test_a_pinned_object_can_be_deleted_and_does_not_come_back_when_it_is_unpinned():
    tier = MemoryTier(2000)
    tier.put(key(0), payload(0))
    tier.pin(key(0))
    tier.delete(key(0))
    tier.unpin(key(0))
    assert not tier.has(key(0))
    assert tier.stats().bytes_used == 0


def test_two_kinds_under_one_digest_are_two_objects():
    tier = MemoryTier(2000)
    tier.put(key(0, "block"), payload(0))
    assert not tier.has(key(0, "state"))


BUDGET_BYTES = 100
MOVES = st.tuples(
    st.sampled_from(["put", "get", "delete", "touch", "pin", "unpin"]), st.integers(0, 7), st.integers(1, 60)
)


@settings(deadline=None, max_examples=300)
@given(st.lists(MOVES, max_size=60))
def test_it_behaves_as_a_dict_with_a_budget(moves):
    spilled, pins, model = [], [], OrderedDict()
    tier = MemoryTier(BUDGET_BYTES, lambda key, payload: spilled.append((key, bytes(payload))))
    for move, number, num_bytes in moves:
        spilled.clear()
        name, is_there, left = key(number), key(number) in model, []
        if move == "put":
            found = model.get(name, payload(number, num_bytes))
            pinned_bytes = sum(model[pin].nbytes for pin in set(pins))
            is_kept = is_there or found.nbytes + pinned_bytes <= BUDGET_BYTES
            assert tier.put(name, found) == is_kept
            if is_kept:
                model[name] = found
                model.move_to_end(name)
            else:
                left.append((name, bytes(found)))
            while sum(value.nbytes for value in model.values()) > BUDGET_BYTES:
                oldest = next(other for other in model if other not in pins)
                left.append((oldest, bytes(model.pop(oldest))))
        elif move == "get":
            assert tier.get(name) == model.get(name)
        elif move == "pin":
            assert tier.pin(name) == model.get(name)
            pins += [name] if is_there else []
        elif move == "unpin":
            tier.unpin(name)
            if name in pins:
                pins.remove(name)
                model.move_to_end(name)
        elif move == "delete" and name not in pins:
            tier.delete(name)
            model.pop(name, None)
        elif move == "touch":
            tier.touch([name])
        if name in model and move in ("get", "touch", "pin"):
            model.move_to_end(name)
        assert spilled == left
        assert {key(n) for n in range(8) if tier.has(key(n))} == set(model)
        assert tier.stats().bytes_used == sum(value.nbytes for value in model.values()) <= BUDGET_BYTES
        assert tier.stats().num_objects == len(model)
