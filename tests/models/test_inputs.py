from dataclasses import replace

import pytest
import torch

from perilune.models.inputs import ForwardBatch
from tests.models.passes import pass_over

MIXED = [([1], 5, [0, 3], 2), ([2], 0, [1], 0), ([3, 4, 5], 2, [4, 2], 4), ([6, 7], 0, [5], 1)]


def test_decoding_sequences_and_the_others_are_two_parts():
    decode, rest = pass_over(MIXED, None).parts
    assert (decode.is_decode, decode.tokens, decode.cu_seqlens.tolist()) == (True, slice(0, 2), [0, 1, 2])
    assert (rest.is_decode, rest.tokens, rest.cu_seqlens.tolist()) == (False, slice(2, 7), [0, 3, 5])
    assert (decode.seq_lens.tolist(), rest.seq_lens.tolist()) == ([6, 1], [5, 2])
    assert (decode.state_slots.tolist(), rest.state_slots.tolist()) == ([2, 0], [4, 1])
    assert (decode.block_table.tolist(), rest.block_table.tolist()) == ([[0, 3], [1, 1]], [[4, 2], [5, 5]])


@pytest.mark.parametrize(("work", "is_decode"), [(MIXED[:2], True), (MIXED[2:], False)])
def test_a_part_without_sequences_is_left_out(work, is_decode):
    batch = pass_over(work, None)
    (part,) = batch.parts
    assert part.is_decode is is_decode
    assert part.tokens == slice(0, len(batch.token_ids))


def test_a_single_token_that_is_not_counted_as_decode_goes_with_the_long_ones():
    (part,) = replace(pass_over(MIXED, None), num_decodes=0).parts
    assert (part.is_decode, part.tokens) == (False, slice(0, 7))


def test_a_whole_pass_is_sequences_of_one_length_without_a_cache():
    batch = ForwardBatch.whole(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.seq_lens.tolist() == [3, 3]
    assert batch.logits_rows.tolist() == list(range(6))
    assert batch.state("recurrent", 0) is None
    rows = torch.arange(12.0).view(6, 2)
    assert torch.equal(batch.write_rows("latent", 0, rows, 3), rows.view(2, 3, 2))


def test_wanted_rows_can_be_chosen():
    assert ForwardBatch.whole(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([2, 5])).logits_rows.tolist() == [2, 5]


def test_rows_are_written_to_their_places_in_their_layer_and_nowhere_else():
    pools = torch.full((2, 6, 4, 3), torch.nan)
    rows = torch.arange(21.0).view(7, 3)
    pool = pass_over(MIXED, {"latent": pools}).write_rows("latent", 1, rows, 3)
    assert pool.data_ptr() == pools[1].data_ptr()
    places = [(3, 1), (1, 0), (4, 2), (4, 3), (2, 0), (5, 0), (5, 1)]
    for row, (block, offset) in zip(rows, places, strict=True):
        assert torch.equal(pools[1, block, offset], row)
    assert pools[0].isnan().all()
    assert int(pools[1, ..., 0].isfinite().sum()) == len(places)


def test_rows_take_the_caches_dtype():
    pools = torch.zeros(1, 6, 4, 3, dtype=torch.bfloat16)
    batch = pass_over(MIXED, {"latent": pools})
    assert batch.write_rows("latent", 0, torch.full((7, 3), 1.001), 3).dtype is torch.bfloat16
    assert pools[0, 1, 0, 0] == 1.0


def test_a_state_is_that_of_its_layer():
    states = torch.zeros(3, 6, 2)
    state = pass_over(MIXED, {"recurrent": states}).state("recurrent", 2)
    state[4] = 1.0
    assert states[2, 4].tolist() == [1.0, 1.0]
    assert not states[:2].any()
