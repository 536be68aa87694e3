"""Passes over a cache whose every row and state starts as a chosen value, NaN say."""

import torch

from perilune.cache.storage import CacheStorage
from perilune.models.inputs import ForwardBatch

BLOCK_SIZE = 4


def filled_cache(model, value, num_blocks=24, num_slots=6):
    storage = CacheStorage(
        model.cache_groups(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_slots=num_slots,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    for view in storage.views.values():
        view.fill_(value)
    return storage


def pass_over(work, cache):
    """work: per sequence (new token ids, tokens before, its blocks in order, its slot), single tokens first."""
    counts = [len(token_ids) for token_ids, *_ in work]
    width = max(len(blocks) for *_, blocks, _ in work)
    slots = []
    for token_ids, before, blocks, _ in work:
        slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(before, before + len(token_ids))]
    return ForwardBatch(
        token_ids=torch.tensor([token_id for token_ids, *_ in work for token_id in token_ids]),
        cu_seqlens=torch.tensor([0, *counts]).cumsum(0),
        seq_lens=torch.tensor([before + count for (_, before, *_), count in zip(work, counts, strict=True)]),
        block_table=torch.tensor([[*blocks, *[blocks[0]] * (width - len(blocks))] for *_, blocks, _ in work]),
        slot_mapping=torch.tensor(slots),
        state_slots=torch.tensor([slot for *_, slot in work]),
        num_decodes=counts.count(1),
        logits_rows=torch.arange(sum(counts)),
        cache=cache,
    )
