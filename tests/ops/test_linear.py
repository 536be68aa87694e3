import copy

import pytest
import torch

from perilune import ops
from perilune.ops.linear import ChannelScaled, WeightGroup
from perilune.ops.linear.reference import round_to_int8
from perilune.ops.linear.weights import LARGEST, unfilled
from tests.ops.calls import assert_close, call, case_named, cases, make_arguments


def full(weight):
    """The weight as float64 [O, I]."""
    if isinstance(weight, ChannelScaled):
        return weight.values.double() * weight.scale.double()[:, None]
    return weight.double()


def rounded(x):
    """x as int8 activations give it, group by group, float64."""
    groups = []
    for group in x.float().split(32, dim=-1):
        largest = group.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        groups.append((group * (torch.tensor(127.0) / largest)).round().double() * (largest / 127).double())
    return torch.cat(groups, dim=-1)


def products(x, weight, int8_activations):
    is_rounded = int8_activations and isinstance(weight, ChannelScaled) and weight.values.dtype is torch.int8
    rows = rounded(x) if is_rounded else x.double()
    return torch.stack([(rows * row).sum(-1) for row in full(weight)], dim=-1)


@cases("dense_linear")
def test_every_output_is_a_dot_product(op_name, case):
    x, weight, int8_activations = make_arguments(op_name, case)
    y, _ = call(op_name, (x, weight, int8_activations))
    assert y.dtype is case.dtype
    assert_close(products(x, weight, int8_activations), y, case.tolerance)


@cases("linear_group")
def test_a_group_is_one_product_for_each_weight(op_name, case):
    x, weights, int8_activations = make_arguments(op_name, case)
    found, _ = call(op_name, (x, weights, int8_activations))
    for weight, y in zip(weights, found, strict=True):
        assert y.dtype is case.dtype
        assert_close(products(x, weight, int8_activations), y, case.tolerance)


def test_leading_dimensions_stay():
    x, weight = torch.rand(2, 3, 16), torch.rand(5, 16)
    assert torch.equal(ops.dense_linear(x, weight)[1], ops.dense_linear(x[1], weight))


def test_gradients_pass_gradcheck():
    x, weight = (torch.rand(size, 16, dtype=torch.float64, requires_grad=True) for size in (3, 5))
    assert torch.autograd.gradcheck(ops.dense_linear, (x, weight))
    other = torch.rand(2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *given: ops.linear_group(given[0], WeightGroup(*given[1:])), (x, weight, other)
    )


def test_a_bfloat16_weight_loses_nothing_beside_float32():
    weight = torch.randn(8, 32).bfloat16()
    x = torch.randn(3, 32)
    assert torch.equal(ops.dense_linear(x, weight), ops.dense_linear(x, weight.float()))


def test_int8_activations_keep_the_largest_round_ties_to_even_and_survive_tiny_groups():
    x = torch.zeros(1, 96)
    x[0, :4] = torch.tensor([127.0, 2.5, -3.5, 0.4])
    x[0, 32:34] = torch.tensor([1e-38, -3e38])
    x[0, 64] = 1e-38
    found = round_to_int8(x)
    assert found[0, :4].tolist() == [127.0, 2.0, -4.0, 0.0]
    assert found[0, 33] == x[0, 33]
    assert found.isfinite().all()
    assert not found[0, 64:].any()


@pytest.mark.parametrize("kind", ["fp8", "mixed, int8 activations"])
def test_the_key_of_a_group_names_every_weight(kind):
    x, weights, _ = make_arguments("linear_group", case_named("linear_group", kind))
    key = ops.linear_group.key(x, weights)
    assert key.dtypes == (
        x.dtype,
        *(weight[0].dtype if isinstance(weight, tuple) else weight.dtype for weight in weights),
    )
    assert key.sizes == (x.shape[1], *(full(weight).shape[0] for weight in weights))
    assert not key.needs_grad
    assert ops.linear_group.key(x, WeightGroup(torch.nn.Parameter(torch.rand(2, x.shape[1])))).needs_grad
    with torch.no_grad():
        assert not ops.linear_group.key(x, WeightGroup(torch.nn.Parameter(torch.rand(2, x.shape[1])))).needs_grad


def test_a_copy_of_a_group_has_addresses_of_its_own():
    group = WeightGroup(torch.rand(4, 16), ChannelScaled(torch.ones(2, 16, dtype=torch.int8), torch.rand(2)))
    assert [rows for _, _, rows, _, _ in group.matrices] == [4, 2]
    for left, right in zip(group.matrices, copy.deepcopy(group).matrices, strict=True):
        assert left[0] != right[0]
        assert left[2:] == right[2:]


@cases("quantize_rows")
def test_values_are_the_nearest_and_the_largest_of_a_row_is_kept(op_name, case):
    _, (weight, (values, scale)) = call(op_name, make_arguments(op_name, case))
    dtype = values.dtype
    scaled = weight.double() / scale.double()[:, None]
    distance = (values.double() - scaled).abs()
    largest = LARGEST[dtype]
    # numbers are one apart, or an eighth of their power of two but at least 2^-9
    spacing = 1.0 if dtype is torch.int8 else 2.0 ** (scaled.abs().clamp_min(2.0**-6).log2().floor() - 3)
    assert (distance <= spacing * 0.5 + largest * 1e-6).all()
    is_zero = ~weight.any(-1)
    assert (values.double().abs().amax(-1)[~is_zero] == largest).all()
    assert not values[is_zero].double().any()


@pytest.fixture(params=["reference", "native"])
def quantised(request):
    """A quantised copy of a weight, by either implementation."""

    def make(weight, dtype):
        into = unfilled(*weight.shape, dtype)
        implementation = ops.quantize_rows.implementation(request.param)
        refusal = implementation.supports(ops.quantize_rows.key(weight, into))
        if refusal is not None:
            pytest.skip(refusal)
        implementation.call(weight, into)
        return into

    return make


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_ties_go_to_the_even_number(quantised, dtype):
    weight = torch.tensor([[LARGEST[dtype], *(x / 512 for x in range(-4096, 4096))]])
    values, scale = quantised(weight, dtype)
    assert scale.item() == 1.0
    expected = weight.round() if dtype is torch.int8 else weight.to(dtype).float()
    assert torch.equal(values.float(), expected)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_number_that_is_not_finite_stays_one(quantised, broken):
    weight = torch.ones(3, 48)
    weight[1, 5] = broken
    assert quantised(weight, torch.int8).scale.isnan().tolist() == [False, True, False]
