import cmath

import pytest
import torch

from perilune import ops
from perilune.ops.case import largest_error
from tests.ops.calls import assert_close, call, case_named, cases, make_arguments


@cases("rotary_turns")
def test_turns_are_those_of_each_tokens_position(op_name, case):
    frequencies, factor, *_ = given = make_arguments(op_name, case)
    turns, _ = call(op_name, given)
    assert turns.dtype is torch.float32
    points = [cmath.rect(factor, p * f) for p in case.layout.positions.tolist() for f in frequencies.tolist()]
    expected = torch.tensor(points).view(-1, case.pairs)
    assert_close(torch.cat((expected.real, expected.imag), dim=-1).double(), turns, case.tolerance)


@cases("rotate")
def test_pairs_are_complex_numbers_that_turn(op_name, case):
    x, turns, is_interleaved = given = make_arguments(op_name, case)
    y, _ = call(op_name, given)
    pairs, kept = case.turned // 2, case.width - case.turned
    assert y.dtype is case.dtype
    assert torch.equal(y[..., :kept], x[..., :kept])
    columns = torch.arange(case.turned).view(pairs, 2) if is_interleaved else torch.arange(case.turned).view(2, pairs).T
    points, turned = (torch.view_as_complex(part[..., kept:].double()[..., columns].contiguous()) for part in (x, y))
    factors = torch.complex(*turns.double().chunk(2, dim=-1))
    expected = points * (factors[:, None] if case.heads else factors)
    assert_close(torch.view_as_real(expected), torch.view_as_real(turned), case.tolerance)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_scores_depend_on_the_distance_alone(is_interleaved):
    frequencies = torch.logspace(0, -4, 8, dtype=torch.float64)
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(q_position, k_position):
        turned = []
        for x, position in ((q, q_position), (k, k_position)):
            turns = ops.rotary_turns(frequencies, 1.0, torch.tensor([position + 1]), torch.tensor([0, 1]), 1)
            turned.append(ops.rotate(x, turns, is_interleaved))
        return (turned[0] * turned[1]).sum()

    assert largest_error(score(9, 2), score(1000009, 1000002)) < 1e-5
    assert largest_error(score(9, 2), score(9, 3)) > 1e-3


def test_the_two_pairings_differ():
    x, turns, _ = make_arguments("rotate", case_named("rotate", "queries"))
    assert largest_error(ops.rotate(x, turns, True), ops.rotate(x, turns, False)) > 0.1
