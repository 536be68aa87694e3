import pytest
import torch

from perilune import ops
from perilune.ops.case import largest_error
from perilune.ops.moe.cases import dense_experts_arguments, packed_experts_arguments
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments


def naive_situ(gate, up, beta, linear_beta):
    g, u = gate.double(), up.double()
    return beta * torch.tanh(g / beta) / (1 + torch.exp(-g)) * linear_beta * torch.tanh(u / linear_beta)


def naive_route(x, weight, bias, num_chosen, renormalize, scaling):
    """Scores in float64, experts ordered as (-(score + bias), id)."""
    ids, weights = [], []
    for row in x.double():
        scores = [1 / (1 + torch.exp(-(row @ w.double()))) for w in weight]
        order = sorted((-(score.item() + b), e) for e, (score, b) in enumerate(zip(scores, bias.tolist(), strict=True)))
        chosen = [e for _, e in order[:num_chosen]]
        own = torch.stack([scores[e] for e in chosen])
        ids.append(chosen)
        weights.append(scaling * (own / own.sum() if renormalize else own))
    return torch.tensor(ids), torch.stack(weights)


def naive_experts(x, expert_ids, expert_weights, w1, w3, w2, beta, linear_beta):
    out = []
    for row, ids, shares in zip(x.double(), expert_ids.tolist(), expert_weights.double(), strict=True):
        y = torch.zeros_like(row)
        for e, share in zip(ids, shares, strict=True):
            inner = naive_situ(w1[e].double() @ row, w3[e].double() @ row, beta, linear_beta)
            y = y + share * (w2[e].double() @ inner)
        out.append(y)
    return torch.stack(out)


@cases("moe_route")
def test_routing_follows_the_formula_with_ties_to_the_lower_id(op_name, case):
    given = make_arguments(op_name, case)
    (ids, weights), _ = call(op_name, given)
    expected_ids, expected_weights = naive_route(*given)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert torch.equal(ids, expected_ids)
    assert_close(expected_weights, weights, case.tolerance)


@cases("moe_route")
def test_renormalised_weights_sum_to_the_scaling(op_name, case):
    _, weights = ops.moe_route(*make_arguments(op_name, case))
    if case.renormalize:
        assert torch.allclose(weights.sum(-1), torch.tensor(case.scaling))
    else:
        assert ((weights > 0) & (weights < 1)).all()


def test_the_bias_chooses_and_does_not_weigh():
    x, weight = torch.zeros(1, 16), torch.zeros(4, 16)
    ids, weights = ops.moe_route(x, weight, torch.tensor([0.0, 5.0, 0.0, 1.0]), 2, True, 1.0)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_equal_logits_tie_wherever_they_stand():
    x = torch.ones(23, 16)
    ids, weights = ops.moe_route(x, torch.full((24, 16), 0.3125 / 16), torch.zeros(24), 5, True, 1.0)
    assert ids.tolist() == [list(range(5))] * 23
    assert weights.unique().numel() == 1


def test_scores_that_underflow_give_finite_weights():
    _, weights = ops.moe_route(torch.ones(1, 16), torch.full((4, 16), -100.0), torch.zeros(4), 2, True, 1.0)
    assert weights.tolist() == [[0.0, 0.0]]


@cases("situ")
def test_situ_follows_the_formula(op_name, case):
    given = make_arguments(op_name, case)
    y, _ = call(op_name, given)
    assert y.dtype is case.dtype
    assert_close(naive_situ(*given), y, case.tolerance)
    assert (y.abs() <= 100).all()


@cases("moe_experts")
def test_the_expert_pass_is_the_weighted_sum(op_name, case):
    given = make_arguments(op_name, case)
    y, after = call(op_name, given)
    assert y.dtype is case.dtype
    assert_close(naive_experts(*given), y, case.tolerance)
    assert all(torch.equal(before, left) for before, left in zip(given[:6], after[:6], strict=True))


@cases("moe_experts_mxfp4")
def test_packed_experts_equal_decoded_ones(op_name, case):
    packed = packed_experts_arguments(case, torch.Generator().manual_seed(0))
    dense = dense_experts_arguments(case, torch.Generator().manual_seed(0))
    assert torch.equal(ops.moe_experts_mxfp4(*packed), ops.moe_experts(*dense))


def test_experts_may_be_separate_tensors():
    x, ids, weights, w1, w3, w2, *betas = make_arguments("moe_experts", case_named("moe_experts", "many tokens"))
    stacked = ops.moe_experts(x, ids, weights, w1, w3, w2, *betas)
    assert torch.equal(stacked, ops.moe_experts(x, ids, weights, list(w1), list(w3), list(w2), *betas))


def test_the_order_of_the_choices_does_not_matter():
    x, ids, weights, *rest = make_arguments("moe_experts", case_named("moe_experts", "top-16"))
    turned = ops.moe_experts(x, ids.flip(1), weights.flip(1), *rest)
    assert largest_error(ops.moe_experts(x, ids, weights, *rest), turned) <= 1e-6


def test_a_neighbour_changes_nothing():
    x, ids, weights, *rest = make_arguments("moe_experts", case_named("moe_experts", "many tokens"))
    together = ops.moe_experts(x, ids, weights, *rest)
    for t in (0, 5, 66):
        own = slice(t, t + 1)
        assert largest_error(ops.moe_experts(x[own], ids[own], weights[own], *rest), together[own]) <= 1e-5


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_of_the_routing_weights_are_those_of_the_formula(renormalize):
    x, weight, bias, chosen, _, scaling = make_arguments("moe_route", case_named("moe_route", "scaled"))
    given = (x[1:], weight, bias, chosen, renormalize, scaling)
    assert_gradients_agree(lambda *own: ops.moe_route(*own)[1], lambda *own: naive_route(*own)[1], given, [0, 1])


def test_gradients_of_situ_are_those_of_the_formula():
    given = make_arguments("situ", case_named("situ", "one row"))
    assert_gradients_agree(ops.situ, naive_situ, given, [0, 1])


def test_gradients_of_the_expert_pass_are_those_of_the_formula():
    given = make_arguments("moe_experts", case_named("moe_experts", "all experts"))
    assert_gradients_agree(ops.moe_experts, naive_experts, given, [0, 2, 3, 4, 5])
