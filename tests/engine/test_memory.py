import re

import pytest

from perilune.cache.spec import CacheGroupSpec
from perilune.config.engine import EngineConfig
from perilune.engine.memory import DEFAULT_SHARE, plan_cache
from perilune.errors import CapacityError, ConfigError

ROWS = CacheGroupSpec("rows", "paged", num_layers=2, row_shape=(8,))  # 64 bytes a token in float32
STATES = CacheGroupSpec("states", "state", num_layers=1, row_shape=(100,), dtype="float32")  # 400 bytes a slot
CONTEXT = 1000


def plan(*, groups=(ROWS, STATES), available_bytes=10**9, **settings):
    return plan_cache(
        EngineConfig(**{"prefix_cache": False, **settings}),
        groups,
        model_dtype="float32",
        max_position_embeddings=CONTEXT,
        available_bytes=available_bytes,
    )


def test_with_memory_to_spare_the_cache_holds_every_request_at_full_length_and_no_more():
    found = plan()
    assert (found.num_blocks, found.num_slots, found.max_model_len) == (16 * 63, 16, CONTEXT)
    assert (found.block_bytes, found.slot_bytes) == (16 * 64, 400)
    assert found.total_bytes == 16 * 63 * 1024 + 16 * 400


def test_by_default_the_cache_takes_a_share_of_what_is_free():
    available = 1_000_000
    found = plan(available_bytes=available)
    assert found.total_bytes <= available * DEFAULT_SHARE < found.total_bytes + found.block_bytes


def test_one_request_may_take_more_than_the_share():
    least = 16 * 1024 + 16 * 400
    assert plan(available_bytes=least).total_bytes == least


def test_cache_bytes_is_a_budget_for_blocks_and_states_together():
    found = plan(cache_bytes=400_000)
    assert found.total_bytes <= 400_000 < found.total_bytes + found.block_bytes


def test_num_blocks_is_taken_as_given():
    assert plan(num_blocks=77).num_blocks == 77


@pytest.mark.parametrize("settings", [{"num_blocks": 77}, {"cache_bytes": 10**5}])
def test_a_cache_larger_than_the_free_memory_is_refused_before_it_is_used(settings):
    needed = plan(**settings).total_bytes
    assert plan(**settings, available_bytes=needed).total_bytes == needed
    with pytest.raises(CapacityError, match="lower num_blocks, cache_bytes or max_num_seqs"):
        plan(**settings, available_bytes=needed - 1)


def test_the_context_is_cut_to_what_the_cache_holds():
    assert plan(num_blocks=20).max_model_len == 320
    assert plan(cache_bytes=16 * 400 + 30 * 1024).max_model_len == 480


def test_a_model_without_paged_groups_keeps_its_context():
    assert plan(groups=(STATES,), available_bytes=10**5).max_model_len == CONTEXT


def test_too_few_blocks_are_refused_with_a_true_remedy():
    for settings in ({}, {"max_model_len": 500}):
        with pytest.raises(CapacityError, match="num_blocks is 3, 48 tokens") as caught:
            plan(num_blocks=3, **settings)
        remedy = int(re.search(r"to at least (\d+)", str(caught.value))[1])
        plan(num_blocks=remedy, **settings)
        with pytest.raises(CapacityError):
            plan(num_blocks=remedy - 1, **settings)


@pytest.mark.parametrize("settings", [{"cache_bytes": 20_000}, {"cache_bytes": 40_000, "max_model_len": 600}])
def test_too_small_a_budget_is_refused_with_true_remedies(settings):
    with pytest.raises(CapacityError, match="cache_bytes") as caught:
        plan(**settings)
    enough = int(re.search(r"cache_bytes to at least (\d+)", str(caught.value))[1])
    plan(**{**settings, "cache_bytes": enough})
    with pytest.raises(CapacityError):
        plan(**{**settings, "cache_bytes": enough - 1})
    fewer = int(re.search(r"max_num_seqs to at most (\d+)", str(caught.value))[1])
    plan(**settings, max_num_seqs=fewer)
    with pytest.raises(CapacityError):
        plan(**settings, max_num_seqs=fewer + 1)


def test_no_remedy_is_offered_that_does_not_help():
    with pytest.raises(CapacityError) as caught:
        plan(available_bytes=16_400)
    assert "the cache may take 16400 bytes (of the free memory)" in str(caught.value)
    assert "max_num_seqs to at most" not in str(caught.value)


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 1001; the model's context is 1000"):
        plan(max_model_len=1001)


def test_kept_states_take_a_share_of_the_cache_up_to_some_per_seat():
    found = plan(prefix_cache=True)
    assert (found.num_kept_states, found.num_slots) == (64, 80)
    small = plan(prefix_cache=True, cache_bytes=16 * 400 + 16 * 1024 + 16_000)
    assert small.num_kept_states == 10
    assert small.total_bytes <= 16 * 400 + 16 * 1024 + 16_000 < small.total_bytes + small.block_bytes


def test_room_for_kept_states_can_be_given_besides_the_cache():
    plain, found = (plan(cache_bytes=400_000), plan(prefix_cache=True, cache_bytes=400_000, state_cache_bytes=4_100))
    assert found.num_blocks == plain.num_blocks
    assert found.num_kept_states == 10
    assert found.total_bytes == plain.total_bytes + 4_000


def test_no_state_is_kept_where_there_is_none():
    assert plan(prefix_cache=True, groups=(ROWS,)).num_kept_states == 0


def test_a_host_tier_that_does_not_fit_is_refused_and_the_remedy_is_true():
    settings = {"cache_bytes": 400_000, "available_bytes": 500_000}
    with pytest.raises(CapacityError) as caught:
        plan(**settings, prefix_cache=True, host_cache_bytes=400_000)
    most = int(re.search(r"host_cache_bytes to at most (\d+)", str(caught.value))[1])
    plan(**settings, prefix_cache=True, host_cache_bytes=most)
    with pytest.raises(CapacityError):
        plan(**settings, prefix_cache=True, host_cache_bytes=most + 1)
