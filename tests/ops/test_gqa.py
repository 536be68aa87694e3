import pytest
import torch

from perilune import ops
from perilune.ops.case import Layout
from perilune.ops.gqa.cases import GroupedCase, attention_arguments
from tests.ops.calls import assert_close, assert_gradients_agree, call, cases, make_arguments
from tests.ops.test_norm import naive_rms


def naive(q, rows, block_table, seq_lens, cu_seqlens, scale):
    """One sequence, token and head after another over the rows it may see."""
    num_heads, width, block_size = *q.shape[1:], rows.shape[1]
    num_kv_heads = rows.shape[2] // (2 * width)
    out = []
    for n, length in enumerate(seq_lens.tolist()):
        own = torch.stack([rows[block_table[n, s // block_size], s % block_size] for s in range(length)]).double()
        k, v = own.unflatten(1, (2, num_kv_heads, width)).unbind(1)
        first, end = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
        for t in range(first, end):
            seen, heads = length - (end - t) + 1, []
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = scale * (k[:seen, kv_head] @ q[t, head].double())
                heads.append(scores.softmax(0) @ v[:seen, kv_head])
            out.append(torch.stack(heads))
    return torch.stack(out)


@cases("gqa_attention")
def test_attention_follows_the_formula_and_writes_nothing(op_name, case):
    given = make_arguments(op_name, case)
    o, after = call(op_name, given)
    assert o.dtype is case.dtype
    assert_close(naive(*given), o, case.tolerance)
    for before, left in zip(given[:5], after[:5], strict=True):
        assert torch.equal(before.view(torch.uint8), left.view(torch.uint8))


@cases("gqa_rows")
def test_keys_are_normed_by_head_and_turned_and_values_left(op_name, case):
    k, v, k_norm, eps, turns, is_interleaved = given = make_arguments(op_name, case)
    rows, _ = call(op_name, given)
    size = case.groups * case.width
    assert torch.equal(rows[:, size:], v)
    heads = torch.stack([naive_rms(head, k_norm, eps) for head in k.unflatten(-1, (-1, case.width)).unbind(1)], 1)
    expected = ops.rotate.reference(heads.float(), turns, is_interleaved)
    assert_close(expected.flatten(1).double(), rows[:, :size], case.tolerance)


@pytest.mark.parametrize("length", [1, 5])
def test_a_row_does_not_depend_on_the_rows_after_it_nor_on_other_sequences(length):
    case = GroupedCase(name="", layout=Layout((length, 3), (20, 9)))
    q, *place, scale = attention_arguments(case, torch.Generator().manual_seed(0))
    alone = [
        ops.gqa_attention(q[t : t + 1], place[0], place[1][:1], torch.tensor([21 + t]), torch.tensor([0, 1]), scale)
        for t in range(length)
    ]
    assert torch.allclose(torch.cat(alone), ops.gqa_attention(q, *place, scale)[:length], rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_the_formula():
    case = GroupedCase(name="", layout=Layout((3, 2), (0, 4)))
    q, rows, *rest = attention_arguments(case, torch.Generator().manual_seed(0))
    given = (q, rows.nan_to_num(), *rest)
    assert_gradients_agree(ops.gqa_attention, naive, given, [0, 1])
