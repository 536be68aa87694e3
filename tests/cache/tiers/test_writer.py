import threading
import time

import pytest

from perilune.cache.tiers.writer import BackgroundWriter
from tests.cache.tiers.objects import RecordingStore, key, payload

LONG_S = 60.0


class GatedStore(RecordingStore):
    """Writes nothing until `gate` is set."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def put(self, key, payload):
        self.gate.wait()
        return super().put(key, payload)


@pytest.fixture
def store():
    return GatedStore()


@pytest.fixture
def writer(store):
    writer = BackgroundWriter(store, max_bytes=2500)
    yield writer
    store.gate.set()
    writer.close()


def soon():
    return time.monotonic() + LONG_S


def test_the_queue_is_bounded_and_what_finds_it_full_is_dropped_at_once(store, writer):
    assert [writer.offer(key(number), payload(number)) for number in range(4)] == [True, True, False, False]
    assert (writer.bytes_waiting, writer.num_dropped) == (2000, 2)
    store.gate.set()
    assert writer.flush(soon())
    assert set(store.objects) == {key(0), key(1)}
    assert writer.bytes_waiting == 0


def test_what_waits_can_be_had_also_while_it_is_being_written(store, writer):
    writer.offer(key(0), payload(0))
    writer.offer(key(1), payload(1))
    assert writer.waiting(key(0)) == payload(0)
    assert writer.waiting(key(1)) == payload(1)
    assert writer.waiting(key(2)) is None


def test_an_object_that_waits_is_not_queued_twice(store, writer):
    assert writer.offer(key(0), payload(0))
    assert writer.offer(key(0), payload(0))
    assert writer.bytes_waiting == 1000


def test_an_empty_queue_takes_an_object_of_any_size(store, writer):
    assert writer.offer(key(0), payload(0, 9000))
    assert not writer.offer(key(1), payload(1))


def test_a_patient_put_waits_for_room_and_gives_up_at_its_deadline(store, writer):
    for number in range(2):
        writer.offer(key(number), payload(number))
    assert not writer.put(key(2), payload(2), time.monotonic())
    threading.Timer(0.01, store.gate.set).start()
    assert writer.put(key(2), payload(2), soon())
    assert writer.flush(soon())
    assert key(2) in store.objects


def test_a_flush_ends_at_its_deadline(store, writer):
    writer.offer(key(0), payload(0))
    assert not writer.flush(time.monotonic())


def test_a_discarded_object_is_not_written(store, writer):
    writer.offer(key(0), payload(0))
    writer.offer(key(1), payload(1))
    writer.discard(key(1))
    assert writer.waiting(key(1)) is None
    store.gate.set()
    writer.discard(key(0))
    assert writer.flush(soon())
    assert key(1) not in store.objects


def test_a_store_that_raises_loses_the_object_and_the_next_is_written(store, writer, caplog):
    store.is_broken = True
    writer.offer(key(0), payload(0))
    store.gate.set()
    assert writer.flush(soon())
    store.is_broken = False
    writer.offer(key(1), payload(1))
    assert writer.flush(soon())
    assert set(store.objects) == {key(1)}
    assert "could not be written" in caplog.text


def test_after_closing_nothing_is_taken(store, writer):
    store.gate.set()
    writer.close()
    assert not writer.offer(key(0), payload(0))
