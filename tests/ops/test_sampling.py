"""Sampling against a walk over sorted tokens in Python numbers; that implementations agree is in test_native."""

import math

import pytest
import torch

from perilune import ops
from perilune.ops.sampling.reference import exp_in_steps
from tests.ops.calls import call, case_named, cases, make_arguments


def allowed(mask, row, token_id):
    return mask is None or bool(mask[row, token_id // 32].item() >> token_id % 32 & 1)


def naive_token(logits, settings, is_allowed):
    """The token by the contract; None where the row has none."""
    temperature, top_k, top_p, min_p, number = settings
    tokens = [i for i in range(len(logits)) if is_allowed(i)]
    if not tokens or any(math.isnan(logits[i]) for i in tokens) or math.isinf(max(logits[i] for i in tokens)):
        return None
    best = max(logits[i] for i in tokens)
    if temperature == 0:
        return logits.index(best) if is_allowed(logits.index(best)) else min(i for i in tokens if logits[i] == best)
    bounded = torch.tensor(min(max(temperature, 1e-6), 1e30), dtype=torch.float32)
    values = (torch.tensor(logits) - torch.tensor(best)) / bounded
    weights = exp_in_steps(values).tolist()
    values = values.tolist()
    masses = [int(weight * 2**40) for weight in weights]
    tokens.sort(key=lambda i: (-values[i], i))
    if top_k:
        tokens = tokens[: int(top_k)]
    if top_p < 1:
        total, kept, reached = sum(masses[i] for i in tokens), [], 0
        for i in tokens:
            if reached >= top_p * total:
                break
            kept.append(i)
            reached += masses[i]
        tokens = kept
    tokens = sorted(i for i in tokens if weights[i] >= torch.tensor(min_p, dtype=torch.float32).item())
    total = sum(masses[i] for i in tokens)
    mark, reached = min(int(number * total), total - 1), 0
    for i in tokens:
        reached += masses[i]
        if reached > mark:
            return i
    raise AssertionError("the mass was not reached")


@cases("sample_tokens")
def test_tokens_are_those_of_the_contract(op_name, case):
    logits, settings, mask = make_arguments(op_name, case)
    (ids, best), _ = call(op_name, (logits, settings, mask))
    for row in range(case.rows):
        values = logits[row].tolist()
        token = naive_token(values, settings[row].tolist(), lambda i, row=row: allowed(mask, row, i))
        assert ids[row] == (-1 if token is None else token)
        assert torch.isfinite(best[row]) == (token is not None)


@cases("penalize")
def test_penalties_follow_their_formula(op_name, case):
    logits, ids, num_prompt, repetition, frequency, presence = given = make_arguments(op_name, case)
    _, (found, *_) = call(op_name, given)
    expected, output = logits.double().tolist(), ids[num_prompt:].tolist()
    for token_id in set(ids.tolist()):
        value = expected[token_id]
        value = value / repetition if value > 0 else value * repetition
        times = output.count(token_id)
        expected[token_id] = value - (frequency * times + presence if times else 0)
    assert torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-5)


def test_the_exponential_is_one_at_zero_and_near_the_true_one():
    x = -torch.cat((torch.linspace(0, 1, 4001), torch.linspace(1, 86, 9001)))
    assert exp_in_steps(x)[0] == 1
    expected = x.double().exp()
    assert float(((exp_in_steps(x).double() - expected) / expected).abs().max()) < 4e-7
    assert float(exp_in_steps(torch.tensor([-torch.inf]))[0]) * 2**40 < 1


def test_a_token_does_not_depend_on_other_rows(isa, num_threads):
    logits, settings, _ = make_arguments("sample_tokens", case_named("sample_tokens", "small"))
    together, _ = ops.sample_tokens(logits, settings, None)
    alone = [ops.sample_tokens(logits[i : i + 1], settings[i : i + 1], None)[0] for i in range(len(logits))]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("bad", [-1, 37, 2**40])
def test_a_penalised_id_outside_the_vocabulary_is_an_error(bad):
    with pytest.raises((IndexError, RuntimeError)):
        ops.penalize(torch.zeros(37), torch.tensor([1, bad]), 1, 1.1, 0.0, 0.0)
