"""The start-up plan: every budget above the floor works, none below does, and what is said to fit fits."""

import re
from dataclasses import replace

import pytest

from perilune.cache.spec import CacheGroupSpec
from perilune.config.engine import EngineConfig
from perilune.engine.policy.startup import PROGRAM_BYTES, Footprint, plan_start
from perilune.errors import CapacityError
from perilune.platform import FreeMemory

ROWS = CacheGroupSpec("rows", "paged", num_layers=2, row_shape=(8,))  # 64 bytes a token in float32
STATES = CacheGroupSpec("states", "state", num_layers=1, row_shape=(100,), dtype="float32")  # 400 bytes a slot
CONTEXT = 1000
MODEL = Footprint(
    resident_bytes=1_000_000,
    packed_bytes=500_000,
    experts_bytes=9_000_000,
    floor_bytes=160_000,
    slots_bytes=9_600_000,
    streams=True,
    draft_bytes=10_000,
    step_bytes=20_000,
    images_bytes=30_000,
)
LEAST_CACHE = 16 * 16 * 64 + 16 * 400
FLOOR = 1_000_000 + 60_000 + 160_000 + LEAST_CACHE
PLENTY = FreeMemory(10**12, "the free memory of this machine")


def plan(*, footprint=MODEL, free=PLENTY, **settings):
    config = settings.pop("config", None) or EngineConfig(**settings)
    return plan_start(
        config, footprint, (ROWS, STATES), model_dtype="float32", max_position_embeddings=CONTEXT, free=free
    )


def budget(room):
    return room + PROGRAM_BYTES


def test_every_budget_from_the_floor_on_works_and_is_kept():
    for room in [FLOOR, FLOOR + 1, *range(FLOOR, 12_000_000, 99_991)]:
        found = plan(memory_budget_bytes=budget(room))
        assert found.total_bytes <= found.room_bytes == room
        assert found.settings.expert_cache_bytes is None or found.settings.expert_cache_bytes >= MODEL.floor_bytes


def test_one_byte_below_the_floor_is_refused_with_the_floor():
    with pytest.raises(CapacityError) as caught:
        plan(memory_budget_bytes=budget(FLOOR) - 1)
    assert f"{FLOOR} bytes are needed at least" in str(caught.value)
    assert f"raise memory_budget_bytes to at least {budget(FLOOR)}" in str(caught.value)
    assert "set dense_weights to int8" in str(caught.value)
    fewer = int(re.search(r"lower max_num_seqs to at most (\d+)", str(caught.value))[1])
    plan(memory_budget_bytes=budget(FLOOR) - 1, max_num_seqs=fewer)


def test_a_budget_below_the_programs_themselves_is_refused():
    with pytest.raises(CapacityError, match=f"leaves 0: .* raise memory_budget_bytes to at least {budget(FLOOR)}$"):
        plan(memory_budget_bytes=1)


def test_experts_stay_in_memory_where_they_fit_and_on_disk_where_not():
    whole = 1_000_000 + 9_000_000 + 60_000 + LEAST_CACHE
    assert plan(memory_budget_bytes=budget(whole)).settings.expert_cache_bytes is None
    found = plan(memory_budget_bytes=budget(whole) - 1)
    assert found.is_chosen
    assert found.settings.expert_cache_bytes > 0.7 * MODEL.experts_bytes


def test_experts_get_what_the_rest_leaves_and_no_more_than_all_of_them_need():
    found = plan(memory_budget_bytes=budget(5_000_000))
    assert found.total_bytes == found.room_bytes
    wide = replace(MODEL, experts_bytes=10**8, slots_bytes=200_000)
    assert plan(footprint=wide, memory_budget_bytes=budget(5_000_000)).settings.expert_cache_bytes == 200_000


def test_without_a_budget_the_machine_or_its_cgroup_decides():
    free = FreeMemory(5_000_000, "the memory cgroup (memory.max)")
    found = plan(free=free)
    assert found.is_chosen
    assert found.total_bytes <= 5_000_000
    assert "the memory cgroup (memory.max) leaves" in found.lines()[0]
    with pytest.raises(CapacityError, match=rf"the memory cgroup \(memory.max\) leaves .* until there are {FLOOR}$"):
        plan(free=replace(free, num_bytes=FLOOR - 1))
    assert plan(free=free, memory_budget_bytes=budget(10**9)).bound == free.bound


def test_a_plan_plans_to_itself_again():
    for settings in ({}, {"prefix_cache": False}, {"cache_bytes": 200_000}, {"host_cache_bytes": 100_000}):
        for room in (3_000_000, 50_000_000):
            found = plan(memory_budget_bytes=budget(room), **settings)
            again = plan(config=found.settings)
            assert (again.settings, again.cache) == (found.settings, found.cache)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"expert_cache_bytes": 400_000},
        {"num_blocks": 300},
        {"cache_bytes": 300_000},
        {"host_cache_bytes": 300_000},
        {"state_cache_bytes": 40_000},
        {"max_num_seqs": 300},
        {"dense_weights": "int8"},
    ],
)
def test_more_memory_never_refuses_what_fitted_and_remedies_are_true(settings):
    refusals, fits = [], []
    for room in range(100_000, 12_000_000, 49_999):
        given = {**settings, "memory_budget_bytes": budget(room)}
        try:
            assert plan(**given).total_bytes <= room
            fits.append(room)
        except CapacityError as error:
            refusals.append((room, given, str(error)))
    assert max(room for room, *_ in refusals) < min(fits)
    for _, given, text in refusals:
        enough = int(re.search(r"raise memory_budget_bytes to at least (\d+)", text)[1])
        plan(**{**given, "memory_budget_bytes": enough})
        with pytest.raises(CapacityError):
            plan(**{**given, "memory_budget_bytes": enough - 1})
        for prefix, name, most in re.findall(r"(set dense_weights to int8 and )?lower (\w+) to at most (\d+)", text):
            packed = {"dense_weights": "int8"} if prefix else {}
            footprint = replace(MODEL, resident_bytes=MODEL.packed_bytes) if prefix else MODEL
            plan(footprint=footprint, **{**given, **packed, name: int(most)})
            with pytest.raises(CapacityError):
                plan(footprint=footprint, **{**given, **packed, name: int(most) + 1})


def test_experts_that_cannot_be_streamed_are_refused_and_say_so():
    unpacked = replace(MODEL, streams=False)
    with pytest.raises(CapacityError, match="stored unpacked, which cannot be streamed"):
        plan(footprint=unpacked, memory_budget_bytes=budget(5_000_000))
    assert plan(footprint=unpacked, memory_budget_bytes=budget(11_000_000)).settings.expert_cache_bytes is None


def test_the_plan_names_every_part_and_what_limits_it():
    first, *parts, last = plan(memory_budget_bytes=budget(8_000_000), host_cache_bytes=50_000).lines()
    assert first.startswith("start-up plan: 0.01 GiB of 0.01 GiB, which memory_budget_bytes (0.50 GiB of it for the ")
    names = [re.sub(r"^ +[\d.]+ GiB  ", "", part).split(":")[0] for part in parts]
    assert names == [
        *["weights outside the routed experts", "routed experts", "draft model", "scratch of a step of 512 tokens"],
        *["pictures kept", "cached rows", "states", "what the cache gives up"],
    ]
    assert last.endswith("limited by max_num_seqs (16 requests of 1000 tokens fit)")
    assert plan(num_blocks=70).lines()[-1].endswith("1 of them at once; limited by num_blocks")
    share = plan(memory_budget_bytes=budget(FLOOR)).lines()[-1]
    assert "limited by a 25% share of what the rest leaves of memory_budget_bytes" in share
