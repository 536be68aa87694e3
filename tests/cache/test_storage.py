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
