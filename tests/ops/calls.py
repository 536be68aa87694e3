"""Calls of ops made from their case tables, for comparison with independent formulas."""

import pytest
import torch

from perilune import ops
from perilune.ops.case import copied, largest_error
from perilune.ops.tables import CASE_TABLES


def cases(*op_names):
    """Parametrizes a test by `op_name` and `case`, over the tables of these ops."""
    params = [
        pytest.param(name, case, id=f"{name}: {case.name}") for name in op_names for case in CASE_TABLES[name].cases
    ]
    return pytest.mark.parametrize(("op_name", "case"), params)


def make_arguments(op_name, case, seed=0):
    return CASE_TABLES[op_name].arguments(case, torch.Generator().manual_seed(seed))


def case_named(op_name, name):
    (case,) = (case for case in CASE_TABLES[op_name].cases if case.name == name)
    return case


def call(op_name, arguments, implementation=None):
    """The reference's result on copies of the arguments, and those copies as it left them; or another's."""
    own = copied(arguments)
    return (implementation or getattr(ops, op_name).reference)(*own), own


def assert_close(expected, found, tolerance):
    """`expected` is float64, `found` what an op gave."""
    error = largest_error(expected.detach(), found.detach().double())
    assert error <= tolerance.relative, f"error {error:.2e} above {tolerance.relative:.2e} ({tolerance.reason})"


def assert_gradients_agree(op, naive, arguments, indices, tolerance=1e-4):
    """Gradients of a random projection of the result, by the op in float32 and by the formula in float64.

    Finite differences of float32 results would drown in rounding, and the ops compute in float32 whatever they get.
    """
    found = _gradients(op, arguments, indices, torch.float32)
    expected = _gradients(naive, arguments, indices, torch.float64)
    for index, right, ours in zip(indices, expected, found, strict=True):
        assert right.abs().max() > 0, f"argument {index} has no influence, so this proves nothing"
        assert torch.isfinite(ours).all()
        assert largest_error(right, ours.double()) <= tolerance, f"gradient of argument {index}"


def _gradients(function, arguments, indices, dtype):
    values = [copied(value) for value in arguments]
    for index in indices:
        values[index] = values[index].to(dtype).requires_grad_()
    result = function(*values)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((result.double() * direction).sum(), [values[index] for index in indices])
