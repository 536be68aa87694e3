import pytest
import torch

from perilune.ops import ragged


def test_lengths_are_the_differences_of_the_bounds():
    assert ragged.lengths(torch.tensor([0, 3, 4, 9])) == [3, 1, 5]


@pytest.mark.parametrize("lengths", [[4], [3, 3], [1, 5, 2], [16, 32]])
@pytest.mark.parametrize("multiple", [1, 4, 16])
def test_padding_ends_in_zeros_and_unpadding_undoes_it(lengths, multiple):
    x = torch.rand(sum(lengths), 2, 3) + 1
    padded = ragged.pad(x, lengths, multiple)
    assert padded.shape[1] % multiple == 0
    assert max(lengths) <= padded.shape[1] < max(lengths) + multiple
    for row, piece in zip(padded, x.split(lengths), strict=True):
        assert torch.equal(row[: len(piece)], piece)
        assert not row[len(piece) :].any()
    assert torch.equal(ragged.unpad(padded, lengths), x)


def test_padding_takes_slices_that_are_not_contiguous():
    q, _ = torch.arange(48.0).view(6, 8).chunk(2, dim=-1)
    assert torch.equal(ragged.unpad(ragged.pad(q, [3, 3]), [3, 3]), q)


def test_gradients_pass_through_padding():
    x = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ragged.unpad(ragged.pad(x, [1, 3, 2], 4) ** 2, [1, 3, 2]), (x,))


def test_rows_are_gathered_in_the_order_of_the_blocks():
    pool = torch.arange(5 * 2 * 3.0).view(5, 2, 3)
    table = torch.tensor([[4, 0, 2], [1, 3, 0]])
    rows = ragged.gather_rows(pool, table, 3)
    assert torch.equal(rows[0], torch.stack([pool[4, 0], pool[4, 1], pool[0, 0]]))
    assert torch.equal(rows[1], torch.stack([pool[1, 0], pool[1, 1], pool[3, 0]]))


def test_blocks_past_the_wanted_rows_are_not_read():
    pool = torch.zeros(2, 4, 1)
    beyond = torch.tensor([[1, 99]])
    assert ragged.gather_rows(pool, beyond, 4).shape == (1, 4, 1)
