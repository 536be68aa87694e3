import pytest
import torch

from perilune import ops
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments


@cases("embed_rows")
def test_embedded_rows_are_those_of_the_weight(op_name, case):
    weight, ids, dtype = make_arguments(op_name, case)
    y, _ = call(op_name, (weight, ids, dtype))
    assert y.dtype is case.dtype
    assert [row.tolist() for row in y.double()] == [weight[i].to(dtype).double().tolist() for i in ids.tolist()]


@cases("store_rows")
def test_stored_rows_replace_those_of_their_slots_and_no_others(op_name, case):
    given = make_arguments(op_name, case)
    _, (pool, slots, rows) = call(op_name, given)
    width = rows.shape[1]
    expected = given[0].clone().view(-1, width)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        expected[slot] = row.to(pool.dtype)
    assert torch.equal(pool.view(-1, width), expected)


@cases("append_rows")
def test_appended_rows_come_behind_those_that_are_there(op_name, case):
    given = make_arguments(op_name, case)
    _, (pool, end, rows) = call(op_name, given)
    assert torch.equal(pool, torch.cat((given[0][:1], rows.to(pool.dtype), given[0][-1:])))
    assert end.tolist() == [1 + case.rows]


@cases("join_rows")
def test_joined_rows_are_those_of_the_parts_in_order(op_name, case):
    given = make_arguments(op_name, case)
    y, _ = call(op_name, given)
    assert y.dtype is case.dtype
    assert y.tolist() == [row for part in given for row in part.tolist()]


@cases("add_rows", "gate_rows", "scale_rows", "swiglu")
def test_row_ops_follow_their_formulas(op_name, case):
    x, other = make_arguments(op_name, case)
    y, _ = call(op_name, (x, other))
    formulas = {
        "add_rows": lambda: x.double() + other.double(),
        "gate_rows": lambda: x.double() / (1 + torch.exp(-other.double())),
        "scale_rows": lambda: x.double() * other,
        "swiglu": lambda: x.double() / (1 + torch.exp(-x.double())) * other.double(),
    }
    assert y.dtype is (torch.float32 if op_name == "scale_rows" else case.dtype)
    tolerance = case_named("gate_rows", "one row, bfloat16").tolerance if case.dtype is torch.bfloat16 else None
    assert_close(formulas[op_name](), y, tolerance or case_named("gate_rows", "one row").tolerance)


@pytest.mark.parametrize("op_name", ["add_rows", "gate_rows", "swiglu"])
def test_gradients_are_those_of_the_formulas(op_name):
    def naive(x, z):
        if op_name == "swiglu":
            return x * torch.sigmoid(x) * z
        return x + z if op_name == "add_rows" else x * torch.sigmoid(z)

    given = make_arguments(op_name, case_named("gate_rows", "odd width"))
    assert_gradients_agree(getattr(ops, op_name), naive, given, [0, 1])


@pytest.mark.parametrize("id_", [-1, 5, 2**40])
def test_an_id_outside_the_weight_is_an_error(id_):
    with pytest.raises(IndexError):
        ops.embed_rows(torch.randn(5, 16), torch.tensor([1, id_]), torch.float32)


@pytest.mark.parametrize("slot", [8, 2**40])
def test_a_slot_outside_the_pool_is_an_error(slot):
    pool = torch.zeros(2, 4, 16)
    with pytest.raises(IndexError):
        ops.store_rows(pool, torch.tensor([0, slot]), torch.ones(2, 16))


@pytest.mark.parametrize("first", [-1, 3, 2**62])
def test_rows_that_do_not_fit_are_an_error_and_nothing_is_written(first):
    pool, end = torch.zeros(4, 16), torch.tensor([first])
    with pytest.raises(IndexError):
        ops.append_rows(pool, end, torch.ones(2, 16))
    assert pool.count_nonzero() == 0
    assert end.tolist() == [first]


def test_a_pool_with_gaps_is_left_to_the_reference():
    pool = torch.zeros(2, 4, 32)[..., :16]
    explained = ops.store_rows.explain(ops.store_rows.key(pool, torch.tensor([1]), torch.ones(1, 16)))
    assert next(candidate.refusal for candidate in explained if candidate.backend == "native") is not None
