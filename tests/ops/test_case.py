"""The case tables are what they claim: complete, repeatable, and awkward where they say so."""

import pytest
import torch

from perilune import ops
from perilune.ops.case import LAYOUTS, largest_error, paged, scattered_slots
from perilune.ops.tables import CASE_TABLES
from tests.ops.calls import call, cases, make_arguments


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


# they work on what is float32 in every model: the copy that a sampler makes of its logits, turns of positions
_FLOAT32_ONLY = {"penalize", "rotary_turns"}


def test_every_public_op_has_cases_in_both_dtypes_with_different_names():
    assert set(CASE_TABLES) == set(ops.__all__)
    for op_name, table in CASE_TABLES.items():
        names = [case.name for case in table.cases]
        assert len(names) == len(set(names))
        dtypes = {torch.float32} if op_name in _FLOAT32_ONLY else {torch.float32, torch.bfloat16}
        assert {case.dtype for case in table.cases} == dtypes
        assert all(case.tolerance.reason for case in table.cases)


@cases(*sorted(CASE_TABLES))
def test_one_seed_gives_one_call_and_its_result_is_finite_unless_the_case_says_otherwise(op_name, case):
    first, second = (make_arguments(op_name, case, seed=3) for _ in range(2))
    for left, right in zip(tensors_in(first), tensors_in(second), strict=True):
        assert left.dtype is right.dtype
        assert torch.equal(left.double().nan_to_num(), right.double().nan_to_num())
    result, _ = call(op_name, first)
    is_finite = all(tensor.double().isfinite().all() for tensor in tensors_in(result))
    assert is_finite is not case.name.startswith("not finite")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_paged_rows_are_found_through_the_table_and_the_rest_is_nan(layout):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.rand(length, 4, generator=generator) for length in layout.seq_lens.tolist()]
    pool, table = paged(rows, 8, generator)
    for own, blocks in zip(rows, table, strict=True):
        found = pool[blocks].flatten(0, 1)
        assert torch.equal(found[: len(own)], own)
        assert found[len(own) :].isnan().all()
    assert int(pool[..., 0].isfinite().sum()) == int(layout.seq_lens.sum())


def test_blocks_and_slots_lie_out_of_order():
    generator = torch.Generator().manual_seed(0)
    _, table = paged([torch.rand(40, 4), torch.rand(24, 4)], 8, generator)
    used = [*table[0, :5].tolist(), *table[1, :3].tolist()]
    assert len(set(used)) == 8
    assert used != sorted(used)
    num_slots, slots = scattered_slots(5, generator)
    assert len(set(slots.tolist())) == 5
    assert slots.tolist() != sorted(slots.tolist())
    assert int(slots.max()) < num_slots


def test_the_largest_error_is_relative_to_the_entry_and_the_whole():
    expected = torch.tensor([3.0, -4.0, 0.0, torch.nan])
    assert largest_error(expected, expected.clone()) == 0.0
    rms = (25 / 3) ** 0.5
    found = torch.tensor([3.0, -4.0, 0.1, torch.nan])
    assert largest_error(expected, found) == pytest.approx(0.1 / rms)
    found = torch.tensor([3.0, -4.1, 0.0, torch.nan])
    assert largest_error(expected, found) == pytest.approx(0.1 / (4 + rms), rel=1e-5)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (torch.zeros(3), torch.full((3,), 1e-30)),
        (torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])),
        (torch.tensor([1.0, torch.nan]), torch.ones(2)),
        (torch.ones(2), torch.tensor([1.0, torch.inf])),
        (torch.ones(3), torch.ones(3, dtype=torch.bfloat16)),
        (torch.ones(3), torch.ones(1, 3)),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
    ],
)
def test_what_may_never_differ_is_an_infinite_error(expected, found):
    assert largest_error(expected, found) == float("inf")


def test_unwritten_memory_is_garbage_during_op_tests():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()
    assert torch.zeros(2).new_empty(4).isnan().all()
    assert torch.empty(2, dtype=torch.int64).tolist() == [2**63 - 1] * 2
