"""Runs chosen token ids through the model with the engine's cache, in any division into passes.

Blocks are handed out interleaved and in falling order, and every row and state that nobody has written holds junk:
a pass that reads past its own rows shows in the logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.cache.storage import CacheStorage
from perilune.models.inputs import ForwardBatch
from perilune.models.model import KimiModel

_JUNK = 3.0


class Replay:
    """Up to `num_sequences` sequences of at most `max_len` tokens, each fed pass by pass."""

    def __init__(self, model: KimiModel, *, num_sequences: int, max_len: int, block_size: int = 16):
        self._model = model
        self._block_size = block_size
        self._lengths = [0] * num_sequences
        blocks_each = -(-max_len // block_size)
        num_blocks = num_sequences * blocks_each + 1
        self._storage = CacheStorage(
            model.cache_groups(),
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_sequences + 1,
            dtype=str(model.dtype).removeprefix("torch."),
        )
        for view in self._storage.views.values():
            view.fill_(_JUNK)
        self._storage.zero_slots([self._slot(sequence) for sequence in range(num_sequences)])
        # block 0 is nobody's; sequence n owns n + 1, n + 1 + num_sequences, and so on, used from the last one down
        self._block_table = torch.arange(1, num_blocks).view(blocks_each, num_sequences).flip(0).T

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """One pass over (sequence, its next token ids) pairs -> logits of every fed token, [tokens, V] per pair."""
        # the pass wants sequences with one new token first
        order = sorted(range(len(work)), key=lambda place: len(work[place][1]) != 1)
        with torch.inference_mode():
            logits_TV = self._model(self._forward_batch([work[place] for place in order]))
        pieces = logits_TV.split([len(work[place][1]) for place in order])
        found = dict(zip(order, pieces, strict=True))
        for sequence, token_ids in work:
            self._lengths[sequence] += len(token_ids)
        return [found[place] for place in range(len(work))]

    def _forward_batch(self, work: Sequence[tuple[int, Sequence[int]]]) -> ForwardBatch:
        sequences = [sequence for sequence, _ in work]
        counts = [len(token_ids) for _, token_ids in work]
        lengths = [self._lengths[sequence] + count for sequence, count in zip(sequences, counts, strict=True)]
        width = -(-max(lengths) // self._block_size)
        rows = [
            self._rows(sequence, length - count, length)
            for sequence, count, length in zip(sequences, counts, lengths, strict=True)
        ]
        return ForwardBatch(
            token_ids=torch.tensor([token_id for _, token_ids in work for token_id in token_ids]),
            cu_seqlens=torch.tensor([0, *counts]).cumsum(0),
            seq_lens=torch.tensor(lengths),
            block_table=self._block_table[sequences, :width],
            slot_mapping=torch.cat(rows),
            state_slots=torch.tensor([self._slot(sequence) for sequence in sequences]),
            num_decodes=counts.count(1),
            logits_rows=torch.arange(sum(counts)),
            cache=self._storage.views,
        )

    def _rows(self, sequence: int, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        blocks = self._block_table[sequence, positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size

    def _slot(self, sequence: int) -> int:
        """State seats are used from the last one down; seat 0 is nobody's."""
        return len(self._lengths) - sequence
