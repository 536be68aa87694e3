import pytest
import torch

from perilune import ops
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments


def naive_rms(x, weight, eps):
    if len(weight) < x.shape[-1]:
        normed, passed = x[..., : len(weight)], x[..., len(weight) :]
        return torch.cat((naive_rms(normed, weight, eps), passed.double()), -1)
    rows = [row / torch.sqrt((row * row).sum() / len(row) + eps) for row in x.double().flatten(0, -2)]
    return torch.stack(rows).view(x.shape) * weight.double()


def naive_gated_rms(x, weight, gate, eps):
    return naive_rms(x, weight, eps) / (1 + torch.exp(-gate.double()))


def naive_layer(x, weight, bias, eps):
    rows = []
    for row in x.double().flatten(0, -2):
        mean = row.sum() / len(row)
        variance = ((row - mean) ** 2).sum() / len(row)
        rows.append((row - mean) / torch.sqrt(variance + eps) * weight.double() + bias.double())
    return torch.stack(rows).view(x.shape)


NAIVE = {"rms_norm": naive_rms, "gated_rms_norm": naive_gated_rms, "layer_norm": naive_layer}


@cases(*NAIVE)
def test_norms_follow_their_formulas(op_name, case):
    given = make_arguments(op_name, case)
    y, after = call(op_name, given)
    assert y.dtype is case.dtype
    assert_close(NAIVE[op_name](*given), y, case.tolerance)
    assert all(torch.equal(left, right) for left, right in zip(given[:-1], after[:-1], strict=True))


def test_the_normed_value_is_rounded_before_the_weight_is_applied():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, generator=generator).to(torch.bfloat16) for _ in range(2))
    unit = x.float() * torch.rsqrt(x.float().square().mean() + 1e-5)
    found = ops.rms_norm(x, weight, 1e-5)
    assert torch.equal(found, unit.to(torch.bfloat16) * weight)
    assert not torch.equal(found, (unit * weight).to(torch.bfloat16))


@pytest.mark.parametrize(("op_name", "indices"), [("rms_norm", [0, 1]), ("gated_rms_norm", [0, 1, 2])])
def test_gradients_are_those_of_the_formulas(op_name, indices):
    given = make_arguments(op_name, case_named(op_name, "heads"))
    assert_gradients_agree(getattr(ops, op_name), NAIVE[op_name], (given[0] + 0.5, *given[1:]), indices)


def test_gradients_of_the_layer_norm_are_those_of_the_formula():
    x, *rest = make_arguments("layer_norm", case_named("layer_norm", "heads"))
    x[0] += torch.linspace(-1, 1, x.shape[-1])
    assert_gradients_agree(ops.layer_norm, naive_layer, (x, *rest), [0, 1, 2])
