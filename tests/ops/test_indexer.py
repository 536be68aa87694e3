import pytest
import torch

from perilune import ops
from perilune.ops.indexer.reference import indexer_scores
from tests.ops.calls import assert_gradients_agree, call, case_named, cases, make_arguments
from tests.ops.packed import unpacked


def naive_scores(q, weights, keys):
    """q [L, J, D], weights [L, J], keys [S, D] -> [L, S] in float64."""
    return torch.stack(
        [
            torch.stack([sum(w * torch.clamp(h @ key, min=0) for w, h in zip(ws, heads, strict=True)) for key in keys])
            for ws, heads in zip(weights.double(), q.double(), strict=True)
        ]
    )


def naive(q, weights, keys, block_table, seq_lens, cu_seqlens, topk):
    """Sorts the pairs (-score, position) of the visible rows, query after query."""
    keys = unpacked(keys, q.shape[-1])
    block_size, out = keys.shape[1], []
    for n, length in enumerate(seq_lens.tolist()):
        own = torch.stack([keys[block_table[n, s // block_size], s % block_size].double() for s in range(length)])
        first, end = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
        for t in range(first, end):
            visible = own[: length - (end - t) + 1]
            dots = (visible @ q[t].double().T).clamp(min=0)
            pairs = sorted((-score, s) for s, score in enumerate((dots @ weights[t].double()).tolist()))
            best = sorted(s for _, s in pairs[:topk])
            out.append(best + [-1] * (topk - len(best)))
    return torch.tensor(out)


@cases("indexer_topk")
def test_the_best_visible_rows_are_selected_with_ties_to_the_lower_position(op_name, case):
    given = make_arguments(op_name, case)
    selected, _ = call(op_name, given)
    expected = naive(*given)
    assert selected.dtype is torch.int64
    assert selected.shape == expected.shape
    assert torch.equal(selected, expected)


def test_ties_go_to_the_lowest_positions():
    given = make_arguments("indexer_topk", case_named("indexer_topk", "every row ties"))
    assert ops.indexer_topk(*given)[-1].tolist() == list(range(16))


def test_a_zero_of_either_sign_ties():
    q, keys = torch.tensor([[[1.0]], [[1.0]], [[1.0]]]), torch.tensor([[[-1.0], [-1.0], [1.0]]])
    place = (torch.tensor([[0]]), torch.tensor([3]), torch.tensor([0, 3]))
    # scores 0, 0 and -1 with a negative head weight, as -0, -0, -1
    assert ops.indexer_topk(q, torch.full((3, 1), -1.0), keys, *place, 2)[2].tolist() == [0, 1]


@pytest.mark.parametrize("position", [5, 20, 30])
def test_a_later_key_changes_no_earlier_selection(position):
    q, weights, keys, table, *rest = make_arguments("indexer_topk", case_named("indexer_topk", "one sequence"))
    changed = keys.clone()
    changed[table[0, position // 16], position % 16] = 100.0
    before, after = (ops.indexer_topk(q, weights, pool, table, *rest) for pool in (keys, changed))
    assert torch.equal(before[:position], after[:position])
    assert not torch.equal(before[position:], after[position:])


def test_a_neighbour_changes_nothing():
    q, weights, keys, table, seq_lens, ends, topk = make_arguments(
        "indexer_topk", case_named("indexer_topk", "lengths differ")
    )
    together = ops.indexer_topk(q, weights, keys, table, seq_lens, ends, topk)
    for n in range(len(seq_lens)):
        own, place = slice(int(ends[n]), int(ends[n + 1])), slice(n, n + 1)
        count = torch.tensor([0, own.stop - own.start])
        alone = ops.indexer_topk(q[own], weights[own], keys, table[place], seq_lens[place], count, topk)
        assert torch.equal(alone, together[own])


def test_gradients_of_the_scores_are_those_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    q, weights, keys = (torch.randn(size, generator=generator) for size in [(4, 3, 16), (4, 3), (5, 16)])
    assert_gradients_agree(
        lambda *own: indexer_scores(*(x[None] for x in own))[0], naive_scores, (q, weights, keys), [0, 1, 2]
    )
