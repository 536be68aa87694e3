import threading
import time

import pytest

from perilune.cache.tiers.disk import DiskTier
from perilune.cache.tiers.stack import LoadItem, TierStack
from tests.cache.tiers.objects import IDENTITY, RecordingStore, key, payload
from tests.cache.tiers.test_writer import GatedStore

LONG_S = 60.0


class Places:
    """Where a load puts things."""

    def __init__(self):
        self.filled = {}

    def item(self, number):
        return LoadItem(key(number), lambda payload: self.filled.__setitem__(number, bytes(payload)))

    def items(self, *numbers):
        return [self.item(number) for number in numbers]


def begin(stack, items):
    load = stack.prepare(items)
    stack.start(load)
    return load


@pytest.fixture
def places():
    return Places()


@pytest.fixture
def open_stack():
    opened = []

    def call(host_bytes=0, slow=None, **settings):
        opened.append(TierStack(host_bytes, slow, **settings))
        return opened[-1]

    yield call
    for stack in opened:
        stack.close()


def test_without_tiers_nothing_is_found_and_nothing_fails(open_stack, places):
    stack = open_stack()
    stack.save(key(0), payload(0))
    assert stack.is_empty
    assert stack.find(key(0)) is None
    assert not begin(stack, places.items(0)).wait(LONG_S)
    assert stack.flush(LONG_S)
    assert stack.stats() == ()


def test_what_memory_has_no_room_for_is_found_on_disk(open_stack, places, tmp_path):
    stack = open_stack(2000, DiskTier(tmp_path, 100_000, IDENTITY))
    for number in range(5):
        stack.save(key(number), payload(number))
    assert stack._writer.flush(time.monotonic() + LONG_S)
    assert [stack.find(key(number)) for number in range(6)] == ["disk"] * 3 + ["host"] * 2 + [None]
    assert begin(stack, places.items(0, 3, 1, 4)).wait(LONG_S)
    assert places.filled == {number: bytes(payload(number)) for number in (0, 3, 1, 4)}
    host, disk = stack.stats()
    assert (host.name, host.num_hits, host.num_objects) == ("host", 2, 2)
    assert (disk.name, disk.num_hits, disk.num_objects) == ("disk", 2, 3)


def test_an_object_on_its_way_to_disk_is_found_and_loaded(open_stack, places):
    store = GatedStore()
    stack = open_stack(0, store)
    stack.save(key(0), payload(0))
    assert stack.find(key(0)) == "host"
    assert begin(stack, places.items(0)).wait(LONG_S)
    store.gate.set()


def test_a_load_of_which_one_object_is_gone_fails_as_a_whole(open_stack, places):
    stack = open_stack(5000)
    stack.save(key(0), payload(0))
    load = begin(stack, places.items(0, 1))
    assert not load.wait(LONG_S)
    assert load.is_done
    assert not load.has_succeeded


def test_a_place_or_a_store_that_raises_fails_the_load_and_the_next_one_works(open_stack, places, caplog):
    store = RecordingStore()
    stack = open_stack(5000, store)
    stack.save(key(0), payload(0))

    def refuse(_):
        raise ValueError("of the wrong size")

    assert not begin(stack, [LoadItem(key(0), refuse)]).wait(LONG_S)
    assert "could not be loaded" in caplog.text
    store.is_broken = True
    assert not begin(stack, places.items(7)).wait(LONG_S)
    assert begin(stack, places.items(0)).wait(LONG_S)


def test_a_cancelled_load_is_done_only_when_nobody_writes_any_more(open_stack, places):
    stack = open_stack(5000)
    began, go_on = threading.Event(), threading.Event()

    def slow(_):
        began.set()
        go_on.wait()

    for number in range(2):
        stack.save(key(number), payload(number))
    load = begin(stack, [LoadItem(key(0), slow), *places.items(1)])
    began.wait()
    load.cancel()
    assert not load.is_done
    go_on.set()
    assert not load.wait(LONG_S)
    assert places.filled == {}


def test_what_is_being_loaded_does_not_leave_memory_meanwhile(open_stack, places):
    stack = open_stack(2000)
    began, go_on = threading.Event(), threading.Event()

    def slow(_):
        began.set()
        go_on.wait()

    for number in range(2):
        stack.save(key(number), payload(number))
    load = begin(stack, [LoadItem(key(0), slow), *places.items(1)])
    began.wait()
    for number in range(2, 6):
        stack.save(key(number), payload(number))
    go_on.set()
    assert load.wait(LONG_S)
    assert places.filled == {1: bytes(payload(1))}
    assert stack.find(key(2)) is None


def test_the_end_of_a_load_is_told_once_and_also_when_it_is_over_already(open_stack, places):
    stack = open_stack(2000)
    stack.save(key(0), payload(0))
    load, told = begin(stack, places.items(0)), []
    load.wait(LONG_S)
    load.on_done(lambda: told.append(1))
    assert told == [1]


def test_a_flush_writes_the_last_used_first_and_leaves_the_order_on_disk(open_stack, tmp_path):
    stack = open_stack(10_000, DiskTier(tmp_path, 3 * 4096, IDENTITY))
    for number in range(5):
        stack.save(key(number), payload(number))
    stack._memory.get(key(0))
    assert stack.flush(LONG_S)
    stack.close()
    disk = DiskTier(tmp_path, 3 * 4096, IDENTITY)
    assert [number for number in range(5) if disk.has(key(number))] == [0, 3, 4]
    disk.put(key(9), payload(9))
    assert [number for number in range(10) if disk.has(key(number))] == [0, 4, 9]
    disk.close()


def test_a_flush_that_runs_out_of_time_says_so(open_stack):
    store = GatedStore()
    store.stats = lambda: DiskBudget()
    stack = open_stack(10_000, store)
    stack.save(key(0), payload(0))
    assert not stack.flush(0.0)
    store.gate.set()


class DiskBudget:
    budget_bytes = 10**9


def test_a_deleted_object_is_found_nowhere(open_stack, tmp_path):
    stack = open_stack(1500, DiskTier(tmp_path, 100_000, IDENTITY))
    for number in range(2):
        stack.save(key(number), payload(number))
    for number in range(2):
        stack.delete(key(number))
    assert stack._writer.flush(time.monotonic() + LONG_S)
    assert [stack.find(key(number)) for number in range(2)] == [None, None]


def test_a_full_queue_to_the_disk_is_a_miss_and_counted(open_stack):
    store = GatedStore()
    stack = open_stack(0, store, queue_bytes=1500)
    for number in range(3):
        stack.save(key(number), payload(number))
    assert [stack.find(key(number)) for number in range(3)] == ["host", None, None]
    assert stack._writer.num_dropped == 2
    store.gate.set()


def test_loads_of_many_threads_and_saves_leave_the_budget_and_no_pin(open_stack, tmp_path):
    stack = open_stack(20_000, DiskTier(tmp_path, 400_000, IDENTITY), queue_bytes=10**6)
    found = []
    for number in range(60):
        stack.save(key(number), payload(number))
        places = Places()
        wanted = range(max(0, number - 25), number + 1)
        found.append((begin(stack, places.items(*wanted)), places, wanted))
    for load, places, wanted in found:
        assert load.wait(LONG_S)
        assert places.filled == {number: bytes(payload(number)) for number in wanted}
    stack._loaders.shutdown(wait=True)
    assert stack._memory._pinned == {}
    assert stack.stats()[0].bytes_used <= 20_000
