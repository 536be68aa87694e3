import math
import random
import sys
from itertools import pairwise

import pytest
import torch

from perilune.sampling.params import SamplingParams
from perilune.sampling.sampler import SampledToken, Sampler, SamplingFailure, SamplingRow, token_logprob, uniform

VOCAB = 37


def row(seed=0, prompt=(), output=(), **fields):
    return SamplingRow(SamplingParams(**fields), seed, prompt, output)


def naive_adjusted(logits, request):
    """Bias and penalties by the book, in Python floats."""
    params, values = request.params, list(logits)
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in {*request.prompt_token_ids, *request.output_token_ids}:
        value, factor = values[token_id], params.repetition_penalty
        values[token_id] = value / factor if value > 0 else value * factor
    for token_id in set(request.output_token_ids):
        count = list(request.output_token_ids).count(token_id)
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return values


def naive_distribution(logits, request):
    """The distribution a row is drawn from: one probability per token, in Python floats."""
    params = request.params
    values = naive_adjusted(logits, request)
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    if params.temperature == 0:
        return [1.0 if token_id == order[0] else 0.0 for token_id in range(len(values))]
    weights = {i: math.exp((values[i] - values[order[0]]) / params.temperature) for i in order}
    if params.top_k:
        order = order[: params.top_k]
    total, before, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if kept and before >= params.top_p * total:
            break
        kept.append(i)
        before += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(values))]


def naive_token(logits, request):
    distribution = naive_distribution(logits, request)
    mark, reached = uniform(request.seed, len(request.output_token_ids)), 0.0
    for token_id, probability in enumerate(distribution):
        reached += probability
        if reached > mark:
            return token_id
    raise AssertionError("the distribution does not sum to one")


def random_request(rng):
    choose = rng.choice
    output = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(8)))
    return row(
        seed=rng.randrange(2**64),
        prompt=tuple(rng.randrange(VOCAB) for _ in range(5)),
        output=output,
        temperature=choose([0, 0.3, 0.7, 1.0, 1.9]),
        top_p=choose([1.0, 1.0, 0.9, 0.5, 0.05]),
        top_k=choose([0, 0, 1, 3, 20, 36, 37, 500, 10**400]),
        min_p=choose([0.0, 0.0, 0.05, 0.4, 1.0]),
        repetition_penalty=choose([1.0, 1.3, 0.7]),
        presence_penalty=choose([0.0, 0.5, -1.0]),
        frequency_penalty=choose([0.0, 0.4, -0.3]),
        logit_bias=choose([{}, {3: 5.0, 30: -100.0}]),
    )


def test_a_mixed_batch_draws_what_the_naive_sampler_draws():
    rng = random.Random(1)
    torch.manual_seed(1)
    for _ in range(40):
        requests = [random_request(rng) for _ in range(12)]
        logits = torch.randn(12, VOCAB) * 3
        sampled = Sampler().sample(logits, requests)
        expected = [naive_token(values, request) for values, request in zip(logits.tolist(), requests, strict=True)]
        assert [token.token_id for token in sampled] == expected


def test_equal_logits_are_cut_by_lower_id_like_the_naive_sampler_cuts_them():
    rng = random.Random(2)
    for _ in range(40):
        requests = [random_request(rng) for _ in range(12)]
        logits = torch.tensor([[float(rng.randrange(4)) for _ in range(VOCAB)] for _ in requests])
        sampled = Sampler().sample(logits, requests)
        expected = [naive_token(values, request) for values, request in zip(logits.tolist(), requests, strict=True)]
        assert [token.token_id for token in sampled] == expected


def test_a_token_does_not_depend_on_the_batch_or_the_place_in_it():
    rng = random.Random(3)
    torch.manual_seed(3)
    requests = [random_request(rng) for _ in range(16)]
    logits = torch.randn(16, VOCAB) * 2
    alone = [Sampler().sample(logits[i : i + 1], [requests[i]])[0] for i in range(16)]
    for size in (2, 5, 16):
        order = rng.sample(range(16), size)
        together = Sampler().sample(logits[order], [requests[i] for i in order])
        assert together == [alone[i] for i in order]


def test_a_large_vocabulary_draws_the_same_alone_and_in_a_batch():
    torch.manual_seed(4)
    logits = torch.randn(6, 50021)
    requests = [row(seed=i, temperature=0.8, top_p=(1.0, 0.95)[i % 2], top_k=(0, 400, 0)[i % 3]) for i in range(6)]
    together = Sampler().sample(logits, requests)
    assert together == [Sampler().sample(logits[i : i + 1], [requests[i]])[0] for i in range(6)]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution(fields):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    num_draws = 4000
    requests = [row(seed=seed, **fields) for seed in range(num_draws)]
    counts = [0] * 8
    for token in Sampler().sample(logits.expand(num_draws, -1), requests):
        counts[token.token_id] += 1
    expected = [probability * num_draws for probability in naive_distribution(logits.tolist(), requests[0])]
    assert all(count == 0 for count, wanted in zip(counts, expected, strict=True) if wanted == 0)
    used = [(count, wanted) for count, wanted in zip(counts, expected, strict=True) if wanted > 0]
    chi_squared = sum((count - wanted) ** 2 / wanted for count, wanted in used)
    # the seeds are fixed: one in ten thousand sets of seeds would exceed this for 7 degrees of freedom
    assert chi_squared < 30


def test_positions_of_one_seed_are_independent_draws():
    marks = [uniform(11, position) for position in range(4000)]
    assert all(0 <= mark < 1 for mark in marks)
    counts = [0] * 16
    for first, second in pairwise(marks):
        counts[int(first * 4) * 4 + int(second * 4)] += 1
    assert sum((count - 249.9) ** 2 / 249.9 for count in counts) < 45
    assert uniform(11, 0) != uniform(12, 0)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_the_global_generator_is_neither_read_nor_moved():
    logits, request = torch.zeros(1, VOCAB), row(seed=5)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = Sampler().sample(logits, [request])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert Sampler().sample(logits, [request]) == first


def test_temperature_zero_takes_the_lowest_of_equal_tokens():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert [token.token_id for token in Sampler().sample(logits, [row(temperature=0)] * 2)] == [1, 0]


def test_top_p_keeps_at_least_the_most_probable_token():
    logits = torch.tensor([[0.0, 0.1, 0.0]])
    tokens = {Sampler().sample(logits, [row(seed=seed, top_p=1e-12)])[0].token_id for seed in range(20)}
    assert tokens == {1}


def test_top_p_counts_the_mass_that_top_k_left():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    requests = [row(seed=seed, top_k=2, top_p=0.55) for seed in range(200)]
    # of the two kept tokens the first has 4/7 > 0.55 of the mass; without top-k it has 0.4
    tokens = {token.token_id for token in Sampler().sample(logits.expand(200, -1), requests)}
    assert tokens == {0}


def test_min_p_one_keeps_only_the_most_probable_tokens():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]]).expand(50, -1)
    tokens = {token.token_id for token in Sampler().sample(logits, [row(seed=s, min_p=1.0) for s in range(50)])}
    assert tokens == {1, 2}


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e300])
def test_an_extreme_temperature_still_draws_an_allowed_token(temperature):
    logits = torch.tensor([[1.0, float("-inf"), 2.0, -1e20]]).expand(50, -1)
    requests = [row(seed=seed, temperature=temperature) for seed in range(50)]
    tokens = {token.token_id for token in Sampler().sample(logits, requests)}
    assert tokens == ({2} if temperature < 1 else {0, 2, 3})


def test_a_forbidden_token_is_never_drawn_even_at_the_end_of_the_range(monkeypatch):
    monkeypatch.setattr("perilune.sampling.sampler.uniform", lambda seed, position: 1 - 2.0**-53)
    logits = torch.tensor([[0.0, 0.3, float("-inf"), float("-inf")]])
    assert Sampler().sample(logits, [row()])[0].token_id == 1


def test_the_naive_sampler_applies_bias_and_penalties_as_counted_by_hand():
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    request = row(prompt=(0, 1), output=(2, 2), logit_bias={3: 0.75}, **penalties)
    by_hand = [2 / 2, -2 * 2, 1 / 2 - 2 * 0.25 - 0.5, 0.5 + 0.75]
    assert naive_adjusted([2.0, -2.0, 1.0, 0.5], request) == pytest.approx(by_hand)


def test_a_penalty_or_a_bias_changes_the_greedy_token():
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    assert Sampler().sample(logits, [row(temperature=0)])[0].token_id == 0
    for fields in (
        {"prompt": (0,), "repetition_penalty": 1.2},
        {"output": (0,), "presence_penalty": 0.2},
        {"output": (0, 0), "frequency_penalty": 0.06},
        {"logit_bias": {1: 0.2}},
    ):
        assert Sampler().sample(logits, [row(temperature=0, **fields)])[0].token_id == 1
    prompt_only = row(temperature=0, prompt=(0, 0), presence_penalty=2.0, frequency_penalty=2.0)
    assert Sampler().sample(logits, [prompt_only])[0].token_id == 0


def test_answers_that_go_on_are_penalised_as_if_each_step_were_the_first():
    sampler, rng, outputs = Sampler(), random.Random(7), [[], [], []]
    prompts = [(3, 5, 5), (3, 5, 5, 8), tuple(range(20))]
    for step in range(40):
        requests = [
            row(step, prompts[place], tuple(output), repetition_penalty=1.5, frequency_penalty=0.3, temperature=0.0)
            for place, output in enumerate(outputs)
            if step % 7 != place
        ]
        logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(step))
        chosen = [sampled.token_id for sampled in sampler.sample(logits, requests)]
        assert chosen == [naive_token(own.tolist(), request) for own, request in zip(logits, requests, strict=True)]
        for output in outputs:
            output.append(rng.randrange(VOCAB))


def test_a_prompt_is_forgotten_when_no_row_needs_it():
    sampler, prompt, logits_RV = Sampler(), tuple(range(9)), torch.zeros(1, VOCAB)
    before = sys.getrefcount(prompt)
    sampler.sample(logits_RV, [row(prompt=prompt, presence_penalty=0.5)])
    assert sys.getrefcount(prompt) > before
    sampler.sample(logits_RV, [row(prompt=prompt)])
    assert sys.getrefcount(prompt) == before


def test_the_logits_are_left_as_they_were():
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    requests = [row(logit_bias={1: 5.0}), row(prompt=(1, 2), repetition_penalty=2.0), row(top_k=3, top_p=0.5)]
    Sampler().sample(logits, requests)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("bad", "found"), [("nan", "NaN"), ("inf", "plus infinity"), ("-inf", "nothing but minus infinity")]
)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad, found, temperature):
    logits = torch.randn(3, VOCAB)
    requests = [row(seed=seed, temperature=temperature, logprobs=1) for seed in range(3)]
    untouched = Sampler().sample(logits, requests)
    if bad == "-inf":
        logits[1] = float(bad)
    else:
        logits[1, 7] = float(bad)
    sampled = Sampler().sample(logits, requests)
    assert isinstance(sampled[1], SamplingFailure)
    assert found in sampled[1].reason
    assert [sampled[0], sampled[2]] == [untouched[0], untouched[2]]


def mask_of(*allowed):
    """The words of one row over VOCAB tokens."""
    words = [0] * -(-VOCAB // 32)
    for token_id in allowed:
        words[token_id // 32] |= 1 << token_id % 32
    return [word - 2**32 if word >= 2**31 else word for word in words]


def test_a_masked_row_takes_allowed_tokens_only_and_the_others_go_on():
    rng = random.Random(6)
    logits = torch.randn(9, VOCAB) * 2
    requests = [random_request(rng) for _ in range(9)]
    untouched = Sampler().sample(logits, requests)
    rows = [[-1, -1]] * 9
    rows[4], rows[7] = mask_of(0, 31, 36), mask_of(35)
    sampled = Sampler().sample(logits, requests, torch.tensor(rows, dtype=torch.int32))
    assert sampled[4].token_id in (0, 31, 36)
    assert sampled[7].token_id == 35
    assert [*sampled[:4], *sampled[5:7], sampled[8]] == [*untouched[:4], *untouched[5:7], untouched[8]]


def test_a_mask_counts_before_the_filters_and_leaves_logprobs_alone():
    logits = torch.tensor([[5.0, 1.0, 0.9, 0.0]])
    mask = torch.tensor([mask_of(1, 2)[:1]], dtype=torch.int32)
    for seed in range(20):
        (sampled,) = Sampler().sample(logits, [row(seed=seed, top_k=1, logprobs=0)], mask)
        assert sampled.token_id == 1
        assert sampled.logprob.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[1]), abs=1e-6)
        assert sampled.logprob.rank == 2


def test_a_mask_that_allows_nothing_is_a_failure():
    (sampled,) = Sampler().sample(torch.zeros(1, VOCAB), [row()], torch.zeros(1, 2, dtype=torch.int32))
    assert isinstance(sampled, SamplingFailure)
    assert "minus infinity" in sampled.reason


def test_no_rows_give_no_tokens():
    assert Sampler().sample(torch.zeros(0, VOCAB), []) == []


def test_bfloat16_logits_are_read_as_their_float32_values():
    logits = (torch.randn(8, VOCAB) * 3).bfloat16()
    rng = random.Random(5)
    requests = [random_request(rng) for _ in range(8)]
    assert Sampler().sample(logits, requests) == Sampler().sample(logits.float(), requests)


def test_logprobs_are_of_the_model_before_penalties_temperature_and_filters():
    logits = torch.randn(1, VOCAB)
    request = row(seed=3, temperature=0.5, top_k=2, logit_bias={4: 100.0}, logprobs=3)
    sampled = Sampler().sample(logits, [request])[0]
    assert isinstance(sampled, SampledToken)
    assert sampled.token_id == 4
    expected = torch.log_softmax(logits[0].double(), -1)
    assert sampled.logprob.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    best = expected.argsort(descending=True).tolist()
    assert sampled.logprob.rank == best.index(4) + 1
    assert [token_id for token_id, _ in sampled.logprob.top] == best[:3]
    top_values = [value for _, value in sampled.logprob.top]
    assert top_values == pytest.approx([float(expected[i]) for i in best[:3]], abs=1e-5)


def test_logprobs_zero_reports_the_chosen_token_only_and_none_reports_nothing():
    sampled = Sampler().sample(torch.zeros(2, VOCAB), [row(logprobs=0), row()])
    assert sampled[0].logprob.top == ()
    assert sampled[1].logprob is None


def test_equal_values_rank_and_list_by_lower_id():
    entry = token_logprob(torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0]), 2, 2)
    assert entry.rank == 2
    assert [token_id for token_id, _ in entry.top] == [1, 2]


def test_more_alternatives_than_tokens_lists_them_all():
    assert len(token_logprob(torch.zeros(3), 0, 20).top) == 3


def test_prompt_logprobs_are_those_of_each_target():
    logits = torch.randn(4, VOCAB)
    entries = Sampler().prompt_logprobs(logits, [3, 1, 4, 1], 2)
    expected = torch.log_softmax(logits.double(), -1)
    assert [entry.token_id for entry in entries] == [3, 1, 4, 1]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [float(expected[i, target]) for i, target in enumerate([3, 1, 4, 1])], abs=1e-5
    )
    assert all(len(entry.top) == 2 for entry in entries)


def test_prompt_logprobs_of_a_row_that_is_not_finite_fail():
    logits = torch.zeros(2, VOCAB)
    logits[1, 0] = float("nan")
    failure = Sampler().prompt_logprobs(logits, [0, 0], 0)
    assert isinstance(failure, SamplingFailure)
    assert "NaN" in failure.reason
