import torch

from perilune import ops
from tests.ops.calls import assert_close, call, cases, make_arguments


@cases("dense_linear")
def test_every_output_is_a_dot_product(op_name, case):
    x, weight = make_arguments(op_name, case)
    expected = torch.stack([(x.double() * row.double()).sum(-1) for row in weight], dim=-1)
    y, _ = call(op_name, (x, weight))
    assert y.dtype is case.dtype
    assert_close(expected, y, case.tolerance)


def test_leading_dimensions_stay():
    x, weight = torch.rand(2, 3, 16), torch.rand(5, 16)
    assert torch.equal(ops.dense_linear(x, weight)[1], ops.dense_linear(x[1], weight))


def test_gradients_pass_gradcheck():
    x, weight = (torch.rand(size, 16, dtype=torch.float64, requires_grad=True) for size in (3, 5))
    assert torch.autograd.gradcheck(ops.dense_linear, (x, weight))
