"""What a planned step looks like to the model."""

import torch

from perilune.engine.request import GenerateRequest
from perilune.sampling.params import SamplingParams
from tests.engine.counting_model import make_core


def batches_of(requests, **options):
    core, model = make_core(keeps=False, **options)
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    return model.batches


def message(request_id, length, **params):
    return GenerateRequest(request_id, tuple(range(1, length + 1)), SamplingParams(temperature=0.0, **params))


def test_sequences_lie_end_to_end_with_single_tokens_first():
    batches = batches_of([message("a", 3, max_tokens=3), message("b", 20, max_tokens=1)], budget=8)
    second = batches[1]
    assert second.num_decodes == 1
    assert second.cu_seqlens.tolist() == [0, 1, 8]
    assert second.seq_lens.tolist() == [4, 12]
    assert second.token_ids.tolist()[1:] == list(range(6, 13))
    assert second.logits_rows.tolist() == [0]


def test_the_slot_mapping_follows_the_block_table():
    for batch in batches_of([message("a", 11, max_tokens=4), message("b", 6, max_tokens=9)], budget=8, block_size=4):
        bounds = batch.cu_seqlens.tolist()
        for index, seq_len in enumerate(batch.seq_lens.tolist()):
            rows = batch.slot_mapping[bounds[index] : bounds[index + 1]].tolist()
            blocks = batch.block_table[index].tolist()
            positions = range(seq_len - len(rows), seq_len)
            assert rows == [blocks[position // 4] * 4 + position % 4 for position in positions]


def test_a_short_block_table_is_filled_with_blocks_of_its_own_sequence():
    batch = batches_of([message("a", 2, max_tokens=1), message("b", 20, max_tokens=1)])[0]
    short, long = batch.block_table.tolist()
    assert len(set(short)) == 1
    assert not set(short) & set(long)


def test_index_tensors_are_int64():
    batch = batches_of([message("a", 2, max_tokens=1)])[0]
    names = ["token_ids", "cu_seqlens", "seq_lens", "block_table", "slot_mapping", "state_slots", "logits_rows"]
    assert {getattr(batch, name).dtype for name in names} == {torch.int64}


def test_no_gradient_is_recorded():
    core, model = make_core()
    core.add(message("a", 2, max_tokens=2))
    while core.has_work:
        core.step()
    assert model.inference_modes == [True, True]
