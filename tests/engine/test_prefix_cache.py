"""Taking up a prefix changes nothing but the work: exactly on the counting model, by log-probabilities on real ones."""

import random

import pytest

from perilune.config.engine import EngineConfig
from perilune.engine.build import assemble_engine, load_model
from perilune.engine.request import FinishReason, GenerateRequest
from perilune.sampling.params import SamplingParams
from tests.engine.counting_model import VOCAB, expected_tokens, make_core, run, tokens_of

BLOCK_SIZE = 4
# float32 rounds differently when products have other shapes; the tiny models amplify that to about 1e-5
TOLERANCE = 1e-4


def message(request_id, token_ids, *, max_tokens=6, hints=(), salt=None, **params):
    sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params})
    return GenerateRequest(request_id, tuple(token_ids), sampling, branch_points=hints, cache_salt=salt)


def last(core, request):
    (outputs,) = run(core, [request]).values()
    return outputs


# --- the counting model: a wrong row or state gives other tokens


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("budget", [32, 9])
def test_a_second_sighting_is_taken_up_and_answers_the_same(length, budget):
    core, model = make_core(budget=budget)
    prompt = [(7 * i) % 50 for i in range(length)]
    assert tokens_of(last(core, message("a", prompt))) == expected_tokens(prompt, 6)
    num_batches = len(model.batches)
    outputs = last(core, message("b", prompt))
    assert tokens_of(outputs) == expected_tokens(prompt, 6)
    assert outputs[-1].num_cached_tokens == length - 1
    assert model.batches[num_batches].token_ids.tolist() == prompt[-1:]


def test_the_next_turn_goes_on_where_the_answer_ended():
    core, _ = make_core()
    prompt = list(range(10))
    answer = tokens_of(last(core, message("a", prompt)))
    outputs = last(core, message("b", [*prompt, *answer, 30, 31]))
    # the last token of the answer was sampled and never computed
    assert outputs[-1].num_cached_tokens == len(prompt) + len(answer) - 1
    assert tokens_of(outputs) == expected_tokens([*prompt, *answer, 30, 31], 6)


def test_a_request_that_was_left_is_taken_up_where_it_stood():
    core, _ = make_core(budget=8)
    prompt = list(range(40))
    core.add(message("a", prompt))
    core.step()
    core.abort("a")
    outputs = last(core, message("b", prompt))
    assert outputs[-1].num_cached_tokens == 8
    assert tokens_of(outputs) == expected_tokens(prompt, 6)


def test_copies_made_inside_a_pass_are_those_of_their_positions():
    """One chunk of 40 tokens: a state every 16, at a branch point, and at the end."""
    core, model = make_core(budget=64)
    prompt = list(range(40))
    last(core, message("a", prompt, hints=(21,), max_tokens=1))
    assert len(model.batches) == 1
    for length in (16, 21, 32):
        other = [*prompt[:length], *range(50, 55)]
        outputs = last(core, message(f"b{length}", other))
        assert outputs[-1].num_cached_tokens == length
        assert tokens_of(outputs) == expected_tokens(other, 6)


def test_prompt_logprobs_are_computed_although_the_prompt_is_cached():
    core, _ = make_core()
    prompt = list(range(20))
    cold = last(core, message("a", prompt, prompt_logprobs=0))
    warm = last(core, message("b", prompt, prompt_logprobs=0))
    assert warm[0].prompt_logprobs == cold[0].prompt_logprobs
    assert len(warm[0].prompt_logprobs) == 20
    assert warm[-1].num_cached_tokens == 0


def test_prompt_logprobs_are_whole_when_the_prompt_is_cut_at_copies():
    prompt = list(range(40))
    plain = last(make_core(keeps=False, budget=64)[0], message("a", prompt, prompt_logprobs=2))
    cut = last(make_core(budget=64)[0], message("a", prompt, prompt_logprobs=2, hints=(21,)))
    assert cut[0].prompt_logprobs == plain[0].prompt_logprobs


def test_a_preempted_request_goes_on_from_its_own_state_if_its_room_was_not_needed():
    core, model = make_core(num_blocks=12, budget=64, max_num_seqs=2, max_model_len=40)
    requests = [message("a", range(16), max_tokens=14), message("b", range(20, 36), max_tokens=14)]
    outputs = run(core, requests)
    assert core.stats().num_preemptions_total > 0
    for request in requests:
        found = tokens_of(outputs[request.request_id])
        assert found == expected_tokens(request.prompt_token_ids, 14)
    num_computed = sum(len(batch.token_ids) for batch in model.batches)
    assert num_computed < 2 * 30 + 16, "the preempted request computed its prompt again"


@pytest.mark.parametrize("seed", range(6))
def test_secrets_never_cross_and_nothing_leaks_in_a_cache_too_small_for_its_users(seed):
    """Many users with common beginnings, each with a secret, some leaving early, in tiny pools."""
    chosen = random.Random(seed)
    core, _ = make_core(num_blocks=24, budget=16, max_num_seqs=4, num_kept=chosen.choice([0, 1, 5]), max_model_len=90)
    system = [chosen.randrange(50) for _ in range(23)]
    expected, found, waiting = {}, {}, []
    for index in range(40):
        secret = [chosen.randrange(50) for _ in range(chosen.randint(1, 12))]
        prompt = [*system[: chosen.choice([0, 8, 23])], *secret]
        salt = chosen.choice([None, "a", "b"])
        hints = (23,) if chosen.random() < 0.5 else ()
        waiting.append(message(f"r{index}", prompt, max_tokens=chosen.randint(1, 20), salt=salt, hints=hints))
        expected[f"r{index}"] = expected_tokens(prompt, waiting[-1].params.max_tokens)
        found[f"r{index}"] = ()
    left = set()
    while waiting or core.has_work:
        if waiting and chosen.random() < 0.6:
            core.add(waiting.pop(0))
        for output in core.step():
            found[output.request_id] += output.token_ids
        if core.live_request_ids and chosen.random() < 0.1:
            left.add(leaver := chosen.choice(core.live_request_ids))
            core.abort(leaver)
        core.check_integrity()
    for request_id, tokens in found.items():
        assert tokens == expected[request_id][: len(tokens)]
        assert request_id in left or tokens == expected[request_id]
    assert core.stats().prefix_tokens_hit_total > 0
    assert core.stats().blocks_used == core.stats().slots_used == 0


def test_a_broken_kept_state_fails_one_request_and_the_next_is_cold_and_right():
    core, _ = make_core()
    prompt = list(range(20))
    last(core, message("a", prompt))
    states = core._runner._storage.views["states"]
    states[:, core._cache._index.slots] = float("nan")
    outputs = last(core, message("b", prompt))
    assert outputs[-1].finish_reason is FinishReason.ERROR
    outputs = last(core, message("c", prompt))
    assert outputs[-1].num_cached_tokens == 0
    assert tokens_of(outputs) == expected_tokens(prompt, 6)


def test_a_state_that_is_not_finite_is_never_kept():
    core, _ = make_core(budget=8)
    core.add(message("a", range(40)))
    core.step()
    core._runner._storage.views["states"][:, core._cache.state_slot("a")] = float("inf")
    core.abort("a")
    assert core.stats().slots_kept == 0
    core.check_integrity()


def test_a_failed_step_gives_back_the_slots_of_its_copies():
    core, _ = make_core()
    outputs = last(core, message("a", [*range(30), VOCAB - 3]))
    assert outputs[-1].finish_reason is FinishReason.ERROR
    core.check_integrity()
    assert core.stats().slots_kept == 0


@pytest.mark.parametrize("count", [2, 5])
def test_a_beginning_that_several_bring_at_once_is_computed_once(count):
    core, model = make_core(budget=128, num_blocks=400, max_num_seqs=8)
    prompt = [(7 * i) % 50 for i in range(120)]
    outputs = run(core, [message(f"r{index}", prompt) for index in range(count)])
    assert all(tokens_of(found) == expected_tokens(prompt, 6) for found in outputs.values())
    assert [outputs[f"r{index}"][-1].num_cached_tokens for index in range(count)] == [0, *[112] * (count - 1)]
    num_computed = sum(len(batch.token_ids) for batch in model.batches)
    # the rest of each prompt behind the last state, and five tokens of each answer
    assert num_computed == 120 + 8 * (count - 1) + 5 * count


def test_a_request_does_not_wait_for_a_beginning_that_is_short_or_another():
    core, _ = make_core(budget=64, num_blocks=400)
    short, long = list(range(20)), [(7 * i) % 50 for i in range(150)]
    core.add(message("a", long))
    core.add(message("b", [*long[:40], *short]))
    core.add(message("c", short))
    core.step()
    assert core.stats().num_running == 3


def test_one_that_waits_for_a_beginning_computes_when_the_other_leaves():
    core, _ = make_core(budget=32, num_blocks=400)
    prompt = [(7 * i) % 50 for i in range(150)]
    core.add(message("a", prompt))
    core.add(message("b", prompt))
    core.step()
    assert core.stats().num_running == 1
    core.abort("a")
    outputs = run(core, [])
    assert tokens_of(outputs["b"]) == expected_tokens(prompt, 6)


def test_users_with_other_salts_do_not_wait_for_each_other():
    core, _ = make_core(budget=64, num_blocks=400)
    prompt = [(7 * i) % 50 for i in range(150)]
    for salt in ("mine", None):
        core.add(message(str(salt), prompt, salt=salt))
    core.step()
    assert core.stats().num_running == 2


# --- the real modules


@pytest.fixture(scope="module", params=["k31-micro", "k3-tiny", "k31-tiny"])
def model(request, micro_checkpoint):
    config = EngineConfig(dtype="float32")
    if request.param == micro_checkpoint.name:
        return load_model(micro_checkpoint, config)
    return load_model(request.getfixturevalue("goldens_dir") / request.param, config)


def engine(model, **changed):
    settings = {"dtype": "float32", "num_blocks": 100, "block_size": BLOCK_SIZE, "max_model_len": 100, **changed}
    return assemble_engine(model, None, EngineConfig(**settings))


def draw(model, seed, length):
    chosen = random.Random(seed)
    return [chosen.randrange(model.config.vocab_size) for _ in range(length)]


def measured(outputs):
    """The most probable tokens and their log-probabilities, step by step."""
    tops = [dict(item.top) for output in outputs for item in output.logprobs]
    return tokens_of(outputs), tops


def assert_equal(found, expected):
    assert measured(found)[0] == measured(expected)[0]
    for here, there in zip(measured(found)[1], measured(expected)[1], strict=True):
        common = here.keys() & there.keys()
        assert len(common) >= 4
        assert all(abs(here[token_id] - there[token_id]) <= TOLERANCE for token_id in common)


CUTS = [block * BLOCK_SIZE + offset for block in (1, 2, 4) for offset in (-1, 0, 1)]


@pytest.mark.parametrize("cut", CUTS)
def test_cached_equals_cold_at_every_kind_of_cut(model, cut):
    """A request that ends leaves its state wherever that is."""
    shared, cold, warm = draw(model, 0, cut), engine(model, prefix_cache=False), engine(model)
    last(warm, message("first", shared, max_tokens=1))
    request = message("second", [*shared, *draw(model, 2, 7)], logprobs=5)
    outputs = last(warm, request)
    assert outputs[-1].num_cached_tokens == cut
    assert_equal(outputs, last(cold, request))


@pytest.mark.parametrize("cut", [15, 16, 17, 31, 32, 33, 50])
def test_a_prompt_taken_up_in_another_computes_the_same_bits(model, cut):
    shared, cold, warm = draw(model, 0, cut), engine(model, prefix_cache=False), engine(model)
    last(warm, message("first", [*shared, *draw(model, 1, 9)], hints=(cut,)))
    request = message("second", [*shared, *draw(model, 2, 7)], logprobs=5)
    outputs = last(warm, request)
    assert outputs[-1].num_cached_tokens == cut // model.grain * model.grain
    assert measured(outputs) == measured(last(cold, request))


def test_forks_that_run_together_equal_each_alone_to_the_bit(model):
    shared = draw(model, 0, 37)
    requests = [message(f"f{i}", [*shared, *draw(model, i + 5, 4 + i)], logprobs=5) for i in range(3)]
    warm = engine(model)
    last(warm, message("first", [*shared, 1, 2], hints=(37,)))
    together = run(warm, requests)
    for request in requests:
        outputs = together[request.request_id]
        assert outputs[-1].num_cached_tokens == 32
        assert measured(outputs) == measured(last(engine(model, prefix_cache=False), request))


def test_a_turn_taken_up_behind_an_answer_equals_one_computed_whole(model):
    prompt, warm = draw(model, 0, 18), engine(model)
    answer = tokens_of(last(warm, message("first", prompt)))
    request = message("second", [*prompt, *answer, *draw(model, 3, 5)], logprobs=5)
    outputs = last(warm, request)
    assert outputs[-1].num_cached_tokens == len(prompt) + len(answer) - 1
    assert_equal(outputs, last(engine(model, prefix_cache=False), request))


def test_states_copied_inside_a_long_pass_equal_those_of_a_pass_that_ends_there(model):
    prompt, warm = draw(model, 0, 60), engine(model, state_interval=20, max_num_batched_tokens=128)
    last(warm, message("first", prompt))
    for cut, grain in ((20, 16), (40, 32)):
        request = message(f"r{cut}", [*prompt[:cut], *draw(model, cut, 6)], logprobs=5)
        outputs = last(warm, request)
        assert outputs[-1].num_cached_tokens == grain
        assert measured(outputs) == measured(last(engine(model, prefix_cache=False), request))


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_packed_rows_are_taken_up_too(goldens_dir, cache_dtype):
    packed = load_model(goldens_dir / "k31-tiny", EngineConfig(dtype="float32", cache_dtype=cache_dtype))
    prompt, warm = draw(packed, 0, 43), engine(packed)
    cold = last(engine(packed, prefix_cache=False), message("a", prompt, logprobs=5))
    last(warm, message("first", prompt))
    outputs = last(warm, message("a", prompt, logprobs=5))
    assert outputs[-1].num_cached_tokens == 32
    assert measured(outputs) == measured(cold)
