import errno
import os
import shutil
import stat
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.cache.tiers import disk
from perilune.cache.tiers.disk import DiskTier
from perilune.cache.tiers.object_file import HEADER_BYTES
from perilune.errors import ConfigError
from tests.cache.tiers.objects import IDENTITY, OTHER_IDENTITY, key, payload

FILE_BYTES = 4096
PAYLOAD_BYTES = FILE_BYTES - HEADER_BYTES


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def object_of(number):
    return payload(number, PAYLOAD_BYTES)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_tier(tmp_path, clock):
    opened = []

    def call(num_files=3, identity=IDENTITY, directory=tmp_path / "kv"):
        opened.append(DiskTier(directory, num_files * FILE_BYTES, identity, clock=clock))
        return opened[-1]

    yield call
    for tier in opened:
        tier.close()


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def objects_below(directory: Path) -> list[Path]:
    return [path for path in files_below(directory) if path.name.startswith(("block-", "state-", ".tmp-"))]


def there(tier, numbers=range(8)):
    return [number for number in numbers if tier.has(key(number))]


def test_an_object_is_found_by_the_next_start_in_the_order_of_use(open_tier, tmp_path):
    tier = open_tier()
    for number in (0, 1, 2):
        assert tier.put(key(number), object_of(number))
    assert tier.get(key(0)) == object_of(0)
    tier.close()
    again = open_tier()
    assert there(again) == [0, 1, 2]
    assert again.put(key(3), object_of(3))
    assert there(again) == [0, 2, 3]
    assert again.get(key(2)) == object_of(2)


def test_the_budget_holds_on_disk_and_a_smaller_one_holds_from_the_start(open_tier, tmp_path):
    tier = open_tier(num_files=5)
    for number in range(8):
        tier.put(key(number), object_of(number))
    assert len(objects_below(tmp_path)) == 5
    assert tier.stats().bytes_used == 5 * FILE_BYTES
    assert tier.stats().num_evicted == 3
    tier.close()
    assert there(open_tier(num_files=2)) == [6, 7]
    assert len(objects_below(tmp_path)) == 2


def test_an_object_beyond_the_budget_is_refused_and_removes_nothing(open_tier):
    tier = open_tier()
    tier.put(key(0), object_of(0))
    assert not tier.put(key(1), payload(1, 4 * FILE_BYTES))
    assert there(tier) == [0]
    assert tier.stats().num_refused == 1


def test_files_of_other_settings_are_left_alone_and_never_read(open_tier, tmp_path):
    other = open_tier(identity=OTHER_IDENTITY)
    other.put(key(0), object_of(0))
    other.close()
    before = {path: path.read_bytes() for path in files_below(tmp_path)}
    tier = open_tier()
    assert tier.get(key(0)) is None
    for number in range(1, 6):
        tier.put(key(number), object_of(number))
    assert {path: path.read_bytes() for path in before} == before
    tier.close()
    assert there(open_tier(identity=OTHER_IDENTITY)) == [0]


@pytest.mark.parametrize("position", [0, 9, 20, 40, HEADER_BYTES - 1, HEADER_BYTES, FILE_BYTES - 1])
def test_a_damaged_file_is_a_miss_is_counted_and_gone(open_tier, position):
    tier = open_tier()
    tier.put(key(0), object_of(0))
    path = tier._directory.path(key(0))
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert tier.get(key(0)) is None
    assert (tier.stats().num_damaged, tier.stats().num_misses, tier.stats().bytes_used) == (1, 1, 0)
    assert not path.exists()
    assert tier.put(key(0), object_of(0))
    assert tier.get(key(0)) == object_of(0)


def test_what_an_interrupted_writer_left_is_removed_at_start_and_files_of_others_are_not(open_tier):
    tier = open_tier()
    tier.put(key(0), object_of(0))
    path = tier._directory.path(key(0))
    leftovers = [path.with_name(f".tmp-77-{path.name}"), path.with_name("state-" + "0" * 32), path.with_name(path.name)]
    leftovers[2] = path.parent / ("state-" + path.parent.name + "1" * 30)
    foreign = [path.with_name("notes.txt"), path.parent.parent / "README"]
    for file in (*leftovers, *foreign):
        file.write_bytes(b"short")
    tier.close()
    again = open_tier()
    assert [file for file in leftovers if file.exists()] == []
    assert all(file.exists() for file in foreign)
    assert there(again) == [0]
    assert again.stats().num_damaged == 4


def test_only_this_user_can_look_inside(open_tier, tmp_path):
    tier = open_tier()
    tier.put(key(0), object_of(0))
    for path in [tier._directory.root, *tier._directory.root.rglob("*")]:
        if path.name != "settings.json":
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_second_process_reads_writes_nothing_and_takes_over_when_the_first_is_gone(open_tier, tmp_path, clock):
    first = open_tier()
    first.put(key(0), object_of(0))
    second = open_tier()
    assert second.get(key(0)) == object_of(0)
    assert not second.put(key(1), object_of(1))
    assert len(objects_below(tmp_path)) == 1
    first.put(key(2), object_of(2))
    first.close()
    assert not second.put(key(1), object_of(1)), "it does not ask for the lock at every object"
    clock.now_s += disk.RETRY_OWNING_S
    assert second.put(key(1), object_of(1))
    assert there(second) == [0, 1, 2]


def test_a_file_that_its_owner_removed_is_a_miss_for_the_reader(open_tier):
    first = open_tier()
    first.put(key(0), object_of(0))
    second = open_tier()
    first.delete(key(0))
    assert second.get(key(0)) is None
    assert not second.has(key(0))
    assert second.stats().num_failed == 0


def test_a_reader_leaves_a_damaged_file_to_its_owner(open_tier):
    first = open_tier()
    first.put(key(0), object_of(0))
    path = first._directory.path(key(0))
    path.write_bytes(b"x" * FILE_BYTES)
    second = open_tier()
    assert second.get(key(0)) is None
    assert path.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
def test_a_failing_write_is_a_miss_and_writing_pauses_while_reading_goes_on(open_tier, monkeypatch, clock, code):
    tier = open_tier()
    tier.put(key(0), object_of(0))
    tries = []

    def fail(*_):
        tries.append(1)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_object", fail)
        assert [tier.put(key(number), object_of(number)) for number in (1, 2, 3)] == [False] * 3
        assert len(tries) == 1
    assert there(tier) == [0]
    assert tier.get(key(0)) == object_of(0)
    assert tier.stats().num_failed == 1
    clock.now_s += 1.0
    assert tier.put(key(1), object_of(1))
    assert tier.put(key(2), object_of(2))


def test_a_disk_that_is_full_in_the_middle_of_a_file_leaves_nothing(open_tier, tmp_path, clock):
    resource = pytest.importorskip("resource")
    tier = open_tier(num_files=100)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        assert not tier.put(key(0), payload(0, 60_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert objects_below(tmp_path) == []
    assert (tier.stats().num_failed, tier.stats().bytes_used) == (1, 0)
    clock.now_s += 1.0
    assert tier.put(key(0), payload(0, 60_000))


def test_a_failing_read_is_a_miss_and_nothing_is_asked_for_a_while(open_tier, monkeypatch, clock):
    tier = open_tier()
    tier.put(key(0), object_of(0))

    def fail(*_):
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_object", fail)
        assert tier.get(key(0)) is None
    assert not tier.has(key(0))
    clock.now_s += 1.0
    assert tier.get(key(0)) == object_of(0)


def test_a_directory_that_vanishes_is_a_miss_and_is_not_made_again(open_tier, tmp_path, clock):
    tier = open_tier()
    tier.put(key(0), object_of(0))
    shutil.rmtree(tmp_path / "kv")
    assert tier.get(key(0)) is None
    for number in range(4):
        assert not tier.put(key(number), object_of(number))
        clock.now_s += 100.0
    assert not (tmp_path / "kv").exists()
    assert tier.stats().bytes_used == 0


@pytest.mark.parametrize("obstacle", ["file", "file above"])
def test_a_directory_that_cannot_be_used_is_refused_at_start(open_tier, tmp_path, obstacle):
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" if obstacle == "file" else tmp_path / "file" / "kv"
    with pytest.raises(ConfigError, match=r"kv_dir is .*file.*name a directory that this user can read and write"):
        open_tier(directory=directory)


def test_a_listing_that_takes_long_delays_the_start_by_a_bound_and_means_misses(open_tier, monkeypatch):
    tier = open_tier()
    tier.put(key(0), object_of(0))
    tier.close()
    monkeypatch.setattr(disk, "SCAN_WAIT_S", 0.0)
    listing = disk.threading.Event()
    scan = disk.ObjectDirectory.scan

    def slow(directory):
        listing.wait()
        return scan(directory)

    monkeypatch.setattr(disk.ObjectDirectory, "scan", slow)
    again = open_tier()
    assert again.get(key(0)) is None
    assert not again.put(key(1), object_of(1))
    listing.set()
    again._opening.join()
    assert again.get(key(0)) == object_of(0)
    assert again.put(key(1), object_of(1))


MOVES = st.tuples(st.sampled_from(["put", "get", "delete", "touch", "reopen"]), st.integers(0, 6), st.integers(1, 9000))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "delete", "touch", "reopen"]), st.integers(0, 6), st.integers(1, 9000)
        ),
        max_size=30,
    )
)
def test_it_behaves_as_a_dict_with_a_budget_over_restarts(tmp_path, open_tier, moves):
    shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    budget_files = 4
    tier, model = open_tier(budget_files), OrderedDict()

    def size(number):
        return tier.size_of(model[number])

    for move, number, num_bytes in moves:
        if move == "put":
            found = model.get(number, payload(number, num_bytes))
            is_kept = tier.size_of(found) <= budget_files * FILE_BYTES
            assert tier.put(key(number), found) == is_kept
            if is_kept:
                model[number] = found
                model.move_to_end(number)
            while sum(map(size, model)) > budget_files * FILE_BYTES:
                model.popitem(last=False)
        elif move == "get":
            assert tier.get(key(number)) == model.get(number)
        elif move == "delete":
            tier.delete(key(number))
            model.pop(number, None)
        elif move == "touch":
            tier.touch([key(number)])
        else:
            tier.close()
            tier = open_tier(budget_files)
        if number in model and move in ("get", "touch"):
            model.move_to_end(number)
        assert there(tier) == sorted(model)
        assert tier.stats().bytes_used == sum(map(size, model))
        assert len(objects_below(tmp_path / "kv")) == len(model)
    tier.close()
