"""Every native implementation against its reference, under every instruction set this processor has."""

import pytest

from perilune import ops
from perilune.ops import _native
from perilune.ops.registry import all_ops
from perilune.ops.tables import CASE_TABLES
from perilune.verify.ops import Skipped, check_case

ops.load_all()
if _native.absence() is not None:
    pytest.skip(_native.absence(), allow_module_level=True)

NATIVE = [name for name, op in sorted(all_ops().items()) if "native" in op.backends]
ISAS = _native.core().available_isas()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("op_name", "case"),
    [pytest.param(name, case, id=f"{name}: {case.name}") for name in NATIVE for case in CASE_TABLES[name].cases],
)
def test_native_equals_reference(op_name, case, isa):
    """Results, and what an op leaves in its arguments (states are updated in place)."""
    (finding,) = check_case(all_ops()[op_name], case, ["native"], [isa])
    if isinstance(finding, Skipped):
        pytest.skip(finding.reason)
    assert not finding.is_failed, finding
