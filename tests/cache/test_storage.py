import mmap
from pathlib import Path

import pytest
import torch

from perilune.cache.spec import CacheGroupSpec
from perilune.cache.storage import CacheStorage
from perilune.errors import CapacityError

GROUPS = [
    CacheGroupSpec("rows", "paged", num_layers=2, row_shape=(3,)),
    CacheGroupSpec("states", "state", num_layers=4, row_shape=(2, 5), dtype="float32"),
]


@pytest.fixture
def storage():
    return CacheStorage(GROUPS, num_blocks=6, block_size=8, num_slots=3, dtype="bfloat16")


def test_views_have_the_declared_shapes_and_dtypes_and_begin_at_zero(storage):
    rows, states = storage.views["rows"], storage.views["states"]
    assert (rows.shape, rows.dtype) == ((2, 6, 8, 3), torch.bfloat16)
    assert (states.shape, states.dtype) == ((4, 3, 2, 5), torch.float32)
    assert not rows.any()
    assert not states.any()


def test_zeroing_slots_clears_those_slots_in_all_layers_and_nothing_else(storage):
    for view in storage.views.values():
        view.fill_(float("nan"))
    storage.zero_slots([0, 2])
    states = storage.views["states"]
    assert not states[:, [0, 2]].any()
    assert states[:, 1].isnan().all()
    assert storage.views["rows"].isnan().all()


def test_zeroing_blocks_clears_those_blocks_in_all_layers_and_nothing_else(storage):
    for view in storage.views.values():
        view.fill_(float("nan"))
    storage.zero_blocks([5])
    rows = storage.views["rows"]
    assert not rows[:, 5].any()
    assert rows[:, :5].isnan().all()
    assert storage.views["states"].isnan().all()


PACKED = [
    CacheGroupSpec("rows", "paged", num_layers=2, row_shape=(3,)),
    CacheGroupSpec("wide", "paged", num_layers=3, row_shape=(4, 2), dtype="float32"),
    CacheGroupSpec("packed", "paged", num_layers=2, row_shape=(17,), dtype="uint8"),
    CacheGroupSpec("small", "paged", num_layers=1, row_shape=(5,), dtype="float8_e4m3fn"),
    CacheGroupSpec("states", "state", num_layers=4, row_shape=(2, 5), dtype="float32"),
    CacheGroupSpec("windows", "state", num_layers=2, row_shape=(7,)),
    CacheGroupSpec("scalar", "state", num_layers=2, row_shape=(), dtype="float32"),
]


def filled(seed):
    """A storage of every dtype with other bytes in every place."""
    storage = CacheStorage(PACKED, num_blocks=5, block_size=4, num_slots=3, dtype="bfloat16")
    generator = torch.Generator().manual_seed(seed)
    for view in storage.views.values():
        values = view.view(torch.uint8)
        values.copy_(torch.randint(0, 256, values.shape, dtype=torch.uint8, generator=generator))
    return storage


def rows_of(storage, kind, seat):
    return [
        bytes(storage.views[group.name][:, seat].contiguous().view(torch.uint8).flatten().tolist())
        for group in PACKED
        if group.kind == kind
    ]


def test_a_block_is_read_as_the_rows_of_all_paged_groups_and_layers():
    storage = filled(0)
    assert storage.block_bytes == 4 * (2 * 3 * 2 + 3 * 8 * 4 + 2 * 17 + 5)
    for block_id in range(5):
        payload = storage.read_block(block_id)
        assert payload.nbytes == storage.block_bytes
        assert bytes(payload) == b"".join(rows_of(storage, "paged", block_id))


def test_a_state_is_read_as_that_of_all_state_groups_and_layers():
    storage = filled(0)
    assert storage.state_bytes == 4 * 10 * 4 + 2 * 7 * 2 + 2 * 4
    assert bytes(storage.read_state(2)) == b"".join(rows_of(storage, "state", 2))


@pytest.mark.parametrize("kind", ["paged", "state"])
def test_what_was_read_can_be_written_elsewhere_and_nothing_else_changes(kind):
    one, other, before = filled(1), filled(2), filled(2)
    if kind == "paged":
        other.write_block(1, one.read_block(2))
    else:
        other.write_state(1, one.read_state(2))
    assert rows_of(other, kind, 1) == rows_of(one, kind, 2)
    for group in PACKED:
        now, then = (storage.views[group.name].unsqueeze(-1).view(torch.uint8).clone() for storage in (other, before))
        if group.kind == kind:
            now[:, 1] = then[:, 1] = 0
        assert torch.equal(now, then), group.name


def test_a_payload_is_a_copy_that_later_steps_do_not_change():
    storage = filled(0)
    payload = storage.read_block(0)
    before = bytes(payload)
    storage.zero_blocks([0])
    assert bytes(payload) == before
    assert payload.readonly


@pytest.mark.parametrize("difference", [-1, 1])
def test_bytes_of_another_size_are_refused_and_nothing_is_written(difference):
    storage, before = filled(0), filled(0)
    with pytest.raises(ValueError, match="bytes are written over"):
        storage.write_block(0, memoryview(bytes(storage.block_bytes + difference)))
    with pytest.raises(ValueError, match="bytes are written over"):
        storage.write_state(0, memoryview(bytes(storage.state_bytes + difference)))
    assert rows_of(storage, "paged", 0) == rows_of(before, "paged", 0)
    assert rows_of(storage, "state", 0) == rows_of(before, "state", 0)


def test_zeroing_nothing_changes_nothing(storage):
    storage.views["states"].fill_(1)
    storage.zero_slots([])
    assert storage.views["states"].all()


@pytest.mark.parametrize("num_blocks", [10**12, 10**20])
def test_a_cache_that_the_machine_refuses_is_an_error_that_names_the_settings(num_blocks):
    with pytest.raises(CapacityError, match="num_blocks"):
        CacheStorage(GROUPS, num_blocks=num_blocks, block_size=16, num_slots=1, dtype="float32")


def test_a_large_cache_takes_memory_only_as_it_is_used():
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * mmap.PAGESIZE

    before = resident_bytes()
    group = CacheGroupSpec("rows", "paged", num_layers=1, row_shape=(1024,), dtype="float32")
    storage = CacheStorage([group], num_blocks=16384, block_size=16, num_slots=1, dtype="float32")
    storage.views["rows"][0, 0] = 1
    assert storage.views["rows"].nbytes == 2**30
    assert resident_bytes() - before < 2**26
