import pytest
import torch

from perilune import ops
from perilune.ops.case import Layout, largest_error
from perilune.ops.mla.cases import LatentCase, arguments
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments
from tests.ops.packed import unpacked

OPS = ("mla_prefill", "mla_decode")


def naive(q, rows, block_table, seq_lens, cu_seqlens, w_uk, w_uv, scale, selected):
    """One sequence, token and head after another over the rows it may see; keys and values are expanded."""
    rows = unpacked(rows, w_uk.shape[2])
    block_size, latent, nope = rows.shape[1], w_uk.shape[2], w_uk.shape[1]
    out = []
    for n, length in enumerate(seq_lens.tolist()):
        own = [rows[block_table[n, s // block_size], s % block_size].double() for s in range(length)]
        first, end = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
        for t in range(first, end):
            position = length - (end - t)
            seen = range(position + 1) if selected is None else [s for s in selected[t].tolist() if s >= 0]
            assert seen
            assert max(seen) <= position
            c = torch.stack([own[s][:latent] for s in seen])
            shared = torch.stack([own[s][latent:] for s in seen])
            heads = []
            for head in range(q.shape[1]):
                query = q[t, head].double()
                scores = scale * (c @ w_uk[head].double().T @ query[:nope] + shared @ query[nope:])
                weights = torch.exp(scores - scores.max())
                heads.append(w_uv[head].double() @ (weights / weights.sum() @ c))
            out.append(torch.stack(heads))
    return torch.stack(out)


@cases(*OPS)
def test_attention_follows_the_formula_and_writes_nothing(op_name, case):
    given = make_arguments(op_name, case)
    o, after = call(op_name, given)
    assert o.dtype is case.dtype
    assert_close(naive(*given), o, case.tolerance)
    for before, left in zip(given, after, strict=True):
        if isinstance(before, torch.Tensor):
            assert torch.equal(before.view(torch.uint8), left.view(torch.uint8))


@cases("mla_prefill")
def test_absorbed_equals_plain(op_name, case):
    given = make_arguments(op_name, case)
    assert largest_error(ops.mla_prefill(*given), ops.mla_decode(*given)) <= case.tolerance.relative


@pytest.mark.parametrize("op_name", OPS)
def test_selecting_every_row_equals_dense_attention_to_the_bit(op_name):
    *given, selected = make_arguments(op_name, case_named(op_name, "more than there are"))
    assert selected is not None
    assert torch.equal(getattr(ops, op_name)(*given, selected), getattr(ops, op_name)(*given, None))


@pytest.mark.parametrize("op_name", OPS)
def test_the_order_of_a_selection_does_not_matter(op_name):
    *given, selected = make_arguments(op_name, case_named(op_name, "few of many rows"))
    assert torch.equal(getattr(ops, op_name)(*given, selected), getattr(ops, op_name)(*given, selected.flip(-1)))


@pytest.mark.parametrize("op_name", OPS)
def test_a_later_row_changes_no_earlier_output(op_name):
    q, rows, table, *rest = make_arguments(op_name, case_named(op_name, "one sequence"))
    changed, position = rows.clone(), 20
    changed[table[0, position // 16], position % 16] += 1.0
    before, after = (getattr(ops, op_name)(q, pool, table, *rest) for pool in (rows, changed))
    assert torch.equal(before[:position], after[:position])
    assert not torch.isclose(before[position:], after[position:]).all(-1).all(-1).any()


@pytest.mark.parametrize("op_name", OPS)
def test_rows_outside_a_selection_have_no_influence(op_name):
    q, rows, table, *rest, selected = make_arguments(op_name, case_named(op_name, "few of many rows"))
    token = 1 + 1 + 49  # the long sequence's last
    outside = set(range(64)) - set(selected[token].tolist())
    assert len(outside) == 56
    changed = rows.clone()
    for position in outside:
        changed[table[2, position // 16], position % 16] += 1.0
    before, after = (getattr(ops, op_name)(q, pool, table, *rest, selected)[token] for pool in (rows, changed))
    assert torch.equal(before, after)


@pytest.mark.parametrize("op_name", OPS)
def test_a_neighbour_changes_nothing(op_name):
    case = case_named(op_name, "lengths differ")
    q, rows, table, seq_lens, ends, *rest = make_arguments(op_name, case)
    together = getattr(ops, op_name)(q, rows, table, seq_lens, ends, *rest)
    for n in range(len(seq_lens)):
        own, place = slice(int(ends[n]), int(ends[n + 1])), slice(n, n + 1)
        count = torch.tensor([0, own.stop - own.start])
        alone = getattr(ops, op_name)(q[own], rows, table[place], seq_lens[place], count, *rest)
        assert largest_error(alone, together[own]) <= case.tolerance.relative


@pytest.mark.parametrize("op_name", OPS)
@pytest.mark.parametrize("topk", [None, 3])
def test_gradients_are_those_of_the_formula(op_name, topk):
    case = LatentCase(name="grad", layout=Layout((6, 6), (0, 0)), block_size=6, heads=2, topk=topk)
    q, rows, table, *rest = arguments(case, torch.Generator().manual_seed(0))
    order = table[:, 0]  # training hands over each sequence as a block of its own: no unused rows
    given = (q, rows[order], torch.arange(2)[:, None], *rest)
    assert_gradients_agree(getattr(ops, op_name), naive, given, [0, 1, 5, 6])
