"""What went to other memory and came back is what it was, on the real modules: by log-probabilities, and to the bit
where passes are cut as a cold prompt's are."""

import random

import pytest

from perilune.config.engine import EngineConfig
from perilune.engine.build import assemble_engine, load_model
from tests.engine.counting_model import tokens_of
from tests.engine.test_prefix_cache import BLOCK_SIZE, assert_equal, draw, last, measured, message
from tests.engine.test_tiers import LONG_S, PLENTY, settle


@pytest.fixture(scope="module", params=["k31-micro", "k3-tiny", "k31-tiny"])
def model(request, micro_checkpoint):
    config = EngineConfig(dtype="float32")
    if request.param == micro_checkpoint.name:
        return load_model(micro_checkpoint, config)
    return load_model(request.getfixturevalue("goldens_dir") / request.param, config)


def engine(model, **changed):
    settings = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_model_len": 60, "num_blocks": 16, **changed}
    settings = {"max_num_seqs": 2, "state_cache_bytes": 0, **settings}
    return assemble_engine(model, None, EngineConfig(**settings), weights="these")


def fill(core, model):
    last(core, message("fill", draw(model, 99, 50), max_tokens=8))


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("cut", [7, 8, 9, 33])
def test_evicted_and_restored_equals_cold(model, tmp_path, where, cut):
    tiers = {"host_cache_bytes": PLENTY} if where == "host" else {"kv_dir": tmp_path, "kv_dir_bytes": PLENTY}
    warm = engine(model, **tiers)
    prompt = draw(model, 0, cut)
    last(warm, message("first", prompt, max_tokens=1))
    fill(warm, model)
    if where == "disk":
        settle(warm._tiers._stack)
    request = message("second", [*prompt, *draw(model, 2, 7)], logprobs=5)
    outputs = last(warm, request)
    assert outputs[-1].num_cached_tokens == cut
    assert warm.stats().tier_tokens_hit_total[where] == cut
    assert_equal(outputs, last(engine(model, prefix_cache=False, state_cache_bytes=None), request))
    warm.close(LONG_S)


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("cut", [15, 16, 17, 33])
def test_a_prompt_restored_in_another_computes_the_same_bits(model, tmp_path, where, cut):
    tiers = {"host_cache_bytes": PLENTY} if where == "host" else {"kv_dir": tmp_path}
    warm, shared = engine(model, **tiers), draw(model, 0, cut)
    last(warm, message("first", [*shared, *draw(model, 1, 9)], hints=(cut,)))
    fill(warm, model)
    if where == "disk":
        settle(warm._tiers._stack)
    request = message("second", [*shared, *draw(model, 2, 7)], logprobs=5)
    outputs = last(warm, request)
    num_cached = cut // model.grain * model.grain
    assert outputs[-1].num_cached_tokens == warm.stats().tier_tokens_hit_total[where] == num_cached
    assert measured(outputs) == measured(last(engine(model, prefix_cache=False, state_cache_bytes=None), request))
    warm.close(LONG_S)


def test_a_session_taken_up_after_a_restart_equals_one_computed_whole(model, tmp_path):
    settings = {"kv_dir": tmp_path, "host_cache_bytes": PLENTY, "state_cache_bytes": None}
    core, prompt = engine(model, **settings), draw(model, 0, 18)
    answer = tokens_of(last(core, message("first", prompt)))
    core.close(LONG_S)
    again = engine(model, **settings)
    request = message("second", [*prompt, *answer, *draw(model, 3, 5)], logprobs=5)
    outputs = last(again, request)
    assert outputs[-1].num_cached_tokens == len(prompt) + len(answer) - 1
    assert again.stats().tier_tokens_hit_total["disk"] == len(prompt) + len(answer) - 1
    assert_equal(outputs, last(engine(model, prefix_cache=False, state_cache_bytes=None), request))
    again.close(LONG_S)


@pytest.mark.parametrize("change", [{"cache_dtype": "int8"}, {"block_size": 8}, {"dtype": "bfloat16"}])
def test_other_settings_find_nothing_in_the_same_directory(goldens_dir, tmp_path, change):
    checkpoint = goldens_dir / "k31-tiny"
    prompt = list(range(20))
    for settings in ({}, change):
        config = {"dtype": "float32", **settings}
        loaded = load_model(checkpoint, EngineConfig(**config))
        core = engine(loaded, kv_dir=tmp_path, state_cache_bytes=None, **config)
        outputs = last(core, message("a", prompt))
        assert outputs[-1].num_cached_tokens == 0
        core.close(LONG_S)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_packed_rows_are_restored_too(goldens_dir, cache_dtype):
    packed = load_model(goldens_dir / "k31-tiny", EngineConfig(dtype="float32", cache_dtype=cache_dtype))
    prompt, warm = draw(packed, 0, 43), engine(packed, host_cache_bytes=PLENTY)
    cold = last(engine(packed, prefix_cache=False, state_cache_bytes=None), message("a", prompt, logprobs=5))
    last(warm, message("first", prompt))
    fill(warm, packed)
    outputs = last(warm, message("a", prompt, logprobs=5))
    assert outputs[-1].num_cached_tokens == 32
    assert measured(outputs) == measured(cold)
    warm.close(LONG_S)


def test_requests_beyond_three_times_the_cache_are_right_each(model):
    """Sessions of several turns, taken up in turns, with a working set that no part of the memory holds."""
    chosen = random.Random(0)
    warm = engine(model, num_blocks=20, host_cache_bytes=PLENTY)
    cold = engine(model, prefix_cache=False, state_cache_bytes=None)
    sessions = [draw(model, seed, 11) for seed in range(6)]
    for turn in range(3):
        for index, history in enumerate(sessions):
            request = message(f"s{index}t{turn}", history, logprobs=5, max_tokens=5)
            outputs = last(warm, request)
            assert_equal(outputs, last(cold, request))
            assert turn == 0 or outputs[-1].num_cached_tokens > 0
            history += [*tokens_of(outputs), *draw(model, chosen.randrange(1000), 4)]
    assert warm.stats().tier_tokens_hit_total["host"] > 0
    warm.close(LONG_S)
