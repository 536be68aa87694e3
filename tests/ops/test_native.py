"""Every native implementation against its reference, under every instruction set this processor has."""

import pytest
import torch

from perilune import ops
from perilune.ops import _native
from perilune.ops.case import largest_error
from perilune.ops.registry import all_ops
from perilune.ops.tables import CASE_TABLES
from tests.ops.calls import call, make_arguments

ops.load_all()
if _native.absence() is not None:
    pytest.skip(_native.absence(), allow_module_level=True)

NATIVE = [(name, op.implementation("native")) for name, op in sorted(all_ops().items()) if op.implementation("native")]
ISAS = _native.core().available_isas()


@pytest.fixture
def isa(request):
    before = _native.core().isa()
    assert _native.core().use_isa(request.param)
    yield request.param
    assert _native.core().use_isa(before)


def flattened(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flattened(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize(
    ("op_name", "case"),
    [pytest.param(name, case, id=f"{name}: {case.name}") for name, _ in NATIVE for case in CASE_TABLES[name].cases],
)
def test_native_equals_reference(op_name, case, isa):
    """Results, and what an op leaves in its arguments (states are updated in place)."""
    op = all_ops()[op_name]
    given = make_arguments(op_name, case)
    refusal = op.implementation("native").supports(op.key(*given))
    if refusal is not None:
        pytest.skip(refusal)
    expected, left = call(op_name, given)
    found, ours = call(op_name, given, op.implementation("native").call)
    for right, got in zip(flattened((expected, *left)), flattened((found, *ours)), strict=True):
        error = largest_error(right, got)
        assert error <= case.tolerance.relative, f"{error:.2e}: {case.tolerance.reason}"
