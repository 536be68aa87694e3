import pytest
import torch

from perilune import ops
from perilune.ops.packed_rows.layout import DTYPES, EIGHT_BIT, row_bytes
from tests.ops.calls import call, cases, make_arguments
from tests.ops.packed import read_row

# the widest gap between neighbours, as a share of the group's largest magnitude; scales are powers of two
STEP = {torch.float8_e4m3fn: 1 / 8, torch.int8: 2 / 127, torch.uint8: 1 / 2}


@cases("store_packed_rows")
def test_stored_rows_replace_those_of_their_slots_and_no_others(op_name, case):
    given = make_arguments(op_name, case)
    _, (pool, slots, rows, num_scaled) = call(op_name, given)
    raw = pool.view(torch.uint8).flatten(0, 1)
    untouched = torch.ones(raw.shape[0], dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(raw[untouched], given[0].view(torch.uint8).flatten(0, 1)[untouched])
    for slot, row in zip(slots.tolist(), rows, strict=True):
        found = torch.tensor(read_row(bytes(raw[slot].tolist()), pool.dtype, num_scaled), dtype=torch.float64)
        assert torch.equal(found[num_scaled:].bfloat16(), row[num_scaled:].bfloat16())
        size = 32 if pool.dtype is torch.uint8 else 128
        groups = zip(found[:num_scaled].split(size), row[:num_scaled].double().split(size), strict=True)
        for own, expected in groups:
            assert (own - expected).abs().max() <= expected.abs().max() * STEP[pool.dtype] / 2
            assert torch.equal(own, own.bfloat16().double())


@pytest.mark.parametrize("values", DTYPES)
def test_the_bytes_of_a_row_of_k3(values):
    widths = (128, 128) if values is torch.uint8 else (512, 576)
    assert row_bytes(values, *widths) == (68 if values is torch.uint8 else 656)
    if values in EIGHT_BIT:
        assert row_bytes(values, 128, 128) == 132


@pytest.mark.parametrize("values", DTYPES)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.usefixtures("isa")
def test_a_group_that_is_not_finite_reads_as_nan_and_harms_no_other(values, broken):
    rows = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    rows[0, 130] = broken
    pool = torch.zeros(1, 2, row_bytes(values, 256, 256), dtype=torch.uint8).view(values)
    other = pool.clone()
    ops.store_packed_rows(pool, torch.tensor([1]), rows, 256)
    ops.store_packed_rows.reference(other, torch.tensor([1]), rows, 256)
    assert torch.equal(pool.view(torch.uint8), other.view(torch.uint8))
    found = torch.tensor(read_row(bytes(pool.view(torch.uint8)[0, 1].tolist()), values, 256))
    size = 32 if values is torch.uint8 else 128
    assert found[128 : 128 + size].isnan().all()
    assert found[:128].isfinite().all()


@pytest.mark.parametrize("slot", [2, 2**40])
def test_a_slot_outside_the_pool_is_an_error(slot):
    pool = torch.zeros(1, 2, 132, dtype=torch.int8)
    with pytest.raises(IndexError):
        ops.store_packed_rows(pool, torch.tensor([slot]), torch.ones(1, 128), 128)


def test_a_pool_whose_rows_have_another_size_is_left_to_the_reference():
    pool = torch.zeros(1, 2, 131, dtype=torch.int8)
    explained = ops.store_packed_rows.explain(
        ops.store_packed_rows.key(pool, torch.tensor([1]), torch.ones(1, 128), 128)
    )
    refusal = next(candidate.refusal for candidate in explained if candidate.backend == "native")
    assert "132 bytes, not 131" in refusal
