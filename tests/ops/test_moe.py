import itertools
from copy import deepcopy

import pytest
import torch

from perilune import ops
from perilune.ops.case import largest_error
from perilune.ops.moe import ExpertTable
from perilune.ops.moe.cases import INT8_CASES, experts_arguments
from perilune.ops.mxfp4.reference import mxfp4_dequantize
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


def naive_experts(x, expert_ids, expert_weights, experts, beta, linear_beta):
    out = []
    for row, ids, shares in zip(x.double(), expert_ids.tolist(), expert_weights.double(), strict=True):
        y = torch.zeros_like(row)
        for e, share in zip(ids, shares, strict=True):
            w1, w3, w2 = (weight.double() for weight in experts[e])
            y = y + share * (w2 @ naive_situ(w1 @ row, w3 @ row, beta, linear_beta))
        out.append(y)
    return torch.stack(out)


def naive_int8(row):
    """Each group of 32 in steps of its largest magnitude / 127."""
    rounded = []
    for group in row.double().split(32):
        step = group.abs().max().item() / 127
        rounded += [round(value / step) * step if step else 0.0 for value in group.tolist()]
    return torch.tensor(rounded, dtype=torch.float64)


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


def test_a_token_that_is_not_a_number_still_names_experts():
    x, bias = torch.full((2, 16), torch.nan), torch.tensor([0.0, 3.0, 1.0, 2.0])
    x[1] = 0.0
    ids, weights = ops.moe_route(x, torch.ones(4, 16), bias, 2, True, 1.0)
    assert ids.tolist() == [[0, 1], [1, 3]]
    assert weights.isnan().tolist() == [[True, True], [False, False]]


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
    assert all(torch.equal(before, left) for before, left in zip(given[:3], after[:3], strict=True))


@cases("moe_experts")
def test_packed_experts_equal_decoded_ones(op_name, case):
    *packed, _ = experts_arguments(case, torch.Generator().manual_seed(0))
    dense = make_arguments(op_name, case)
    assert torch.equal(ops.moe_experts_mxfp4.reference(*packed), ops.moe_experts.reference(*dense))


# Among bfloat16 values exact halves of a step are common, which float64 and float32 round to different sides.
FLOAT32_INT8 = [case for case in INT8_CASES if case.dtype is torch.float32 and case.num_experts < 100]


@pytest.mark.parametrize("case", FLOAT32_INT8, ids=lambda case: case.name)
def test_int8_activations_are_rounded_per_32_columns(case):
    x, ids, shares, experts, beta, linear_beta, _ = given = make_arguments("moe_experts_mxfp4", case)
    dense = [[mxfp4_dequantize(e[at], e[at + 1]).double() for at in (0, 2, 4)] for e in experts]
    expected = torch.zeros_like(x, dtype=torch.float64)
    for t, k in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        w1, w3, w2 = dense[ids[t, k]]
        gate, up = (w @ naive_int8(x[t]) for w in (w1, w3))
        expected[t] += shares[t, k] * (w2 @ naive_int8(naive_situ(gate, up, beta, linear_beta)))
    assert_close(expected, call("moe_experts_mxfp4", given)[0], case.tolerance)


def test_a_table_knows_where_its_tensors_lie():
    packed = make_arguments("moe_experts_mxfp4", case_named("moe_experts_mxfp4", "one token"))[3]
    assert packed.is_packed
    assert packed.shape == (6, 96, 64)
    assert packed.addresses[4].tolist() == [tensor.data_ptr() for tensor in packed[4]]
    assert packed.addresses is packed.addresses
    dense = make_arguments("moe_experts", case_named("moe_experts", "one token"))[3]
    assert not dense.is_packed
    assert dense.shape == (6, 96, 64)
    w1, w3, w2 = (tensor.data_ptr() for tensor in dense[4])
    assert dense.addresses[4].tolist() == [w1, 0, w3, 0, w2, 0]


def test_a_copied_table_has_addresses_of_its_own():
    table = make_arguments("moe_experts", case_named("moe_experts", "one token"))[3]
    before = table.addresses.clone()
    copy = deepcopy(table)
    assert (copy.addresses[:, ::2] != before[:, ::2]).all()


def test_a_table_refuses_tensors_with_gaps():
    w = torch.zeros(4, 32, 32)
    with pytest.raises(AssertionError):
        _ = ExpertTable.dense(w, w.mT, w).addresses


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
    x, ids, weights, experts, *betas = make_arguments("moe_experts", case_named("moe_experts", "all experts"))
    stacked = [torch.stack(column) for column in zip(*experts, strict=True)]

    def over_stacks(op):
        return lambda x, weights, *stacks: op(x, ids, weights, ExpertTable.dense(*stacks), *betas)

    given = (x, weights, *stacked)
    assert_gradients_agree(over_stacks(ops.moe_experts), over_stacks(naive_experts), given, range(5))
