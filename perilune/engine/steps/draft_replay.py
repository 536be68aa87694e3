"""Draft passes replayed from recordings, as the target's steps are.

N sequences with blocks of L rows each; a recording holds for N and a width of the block table.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perilune.engine.batch import ScheduledSequence
from perilune.engine.steps.replay import NARROWEST, TRIALS, cache_rows, fill_table_row
from perilune.models.draft.block import DraftBlocks
from perilune.models.draft.model import Choose, DraftModel, Drafts
from perilune.ops.recording import Arena, record, replay

_LOG = logging.getLogger(__name__)


@dataclass
class _Pass:
    """A recorded pass: its inputs, whose contents are exchanged, its program and what it writes."""

    anchor_ids: Tensor
    blocks: DraftBlocks
    program: Any
    drafts: Drafts
    tables: list[tuple[int, ...]]


class ReplayedDrafts:
    """Runs a draft's passes over the rows in `cache`, for `num_drafts` drafts of each sequence."""

    def __init__(self, draft: DraftModel, cache: Mapping[str, Tensor], num_drafts: int, block_size: int):
        self._draft = draft
        self._cache = cache
        self._num_drafts = num_drafts
        self._block_size = block_size
        self._arena = Arena()
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._refusals: Counter[tuple[int, int]] = Counter()

    def run(self, sequences: Sequence[ScheduledSequence], choose: Choose | None = None) -> Drafts:
        """Drafts behind the last token of each sequence, overwritten by the next pass; `choose` and IndexError as in
        `DraftModel.draft`.
        """
        widest = max(len(sequence.block_table) for sequence in sequences)
        key = len(sequences), max(NARROWEST, 1 << (widest - 1).bit_length())
        found = self._passes.get(key)
        if choose is not None:
            return self._run(*self._inputs(key, sequences), choose)
        if found is not None:
            self._exchange(found, sequences)
            replay(found.program)
            return found.drafts
        return self._record(key, sequences)

    def _run(self, anchor_ids: Tensor, blocks: DraftBlocks, choose: Choose | None = None) -> Drafts:
        return self._draft.draft(self._draft(blocks), anchor_ids, self._num_drafts, choose)

    def _inputs(self, key: tuple[int, int], sequences: Sequence[ScheduledSequence]) -> tuple[Tensor, DraftBlocks]:
        anchor_ids = torch.tensor([sequence.token_ids[-1] for sequence in sequences])
        table_NB = torch.empty(key, dtype=torch.int64)
        for row_B, sequence in zip(table_NB, sequences, strict=True):
            fill_table_row(row_B, sequence.block_table)
        num_before = torch.tensor([sequence.seq_len - 1 for sequence in sequences])
        blocks = self._draft.blocks(anchor_ids, num_before, table_NB, self._cache, num_drafts=self._num_drafts)
        return anchor_ids, blocks

    def _record(self, key: tuple[int, int], sequences: Sequence[ScheduledSequence]) -> Drafts:
        anchor_ids, blocks = self._inputs(key, sequences)
        if self._refusals[key] >= TRIALS:
            return self._run(anchor_ids, blocks)
        recording = record(partial(self._run, anchor_ids, blocks), self._arena)
        if recording.program is None:
            self._refusals[key] += 1
            _LOG.debug("draft passes of %s are not replayed: %s", key, recording.refusal)
        else:
            tables = [sequence.block_table for sequence in sequences]
            self._passes[key] = _Pass(anchor_ids, blocks, recording.program, self._alias(recording.result), tables)
        return recording.result

    def _alias(self, drafts: Drafts) -> Drafts:
        alias = self._arena.alias
        ids, markov_rows = tuple(map(alias, drafts.ids)), tuple(map(alias, drafts.markov_rows))
        return Drafts(ids, alias(drafts.rows_KND), markov_rows, alias(drafts.base_KNV))

    def _exchange(self, found: _Pass, sequences: Sequence[ScheduledSequence]) -> None:
        """Put what these sequences have into the inputs of a recorded pass."""
        blocks, draft = found.blocks, self._draft
        num_rows = blocks.token_ids.shape[0] // len(sequences)
        anchors = torch.tensor([sequence.token_ids[-1] for sequence in sequences])
        found.anchor_ids.copy_(anchors)
        blocks.token_ids[::num_rows] = anchors
        ends = [sequence.seq_len - 1 + num_rows for sequence in sequences]
        seen = [
            end if not draft.config.is_causal else end - num_rows + row + 1 for end in ends for row in range(num_rows)
        ]
        blocks.seq_lens.copy_(torch.tensor(seen))
        rows = [
            row
            for sequence, end in zip(sequences, ends, strict=True)
            for row in cache_rows(sequence.block_table, range(end - num_rows, end), self._block_size)
        ]
        blocks.slot_mapping.copy_(torch.tensor(rows))
        blocks.turns.copy_(draft.turns(torch.tensor(ends), num_rows))
        for index, sequence in enumerate(sequences):
            if found.tables[index] != sequence.block_table:
                found.tables[index] = sequence.block_table
                own_LB = blocks.block_table[index * num_rows : (index + 1) * num_rows]
                fill_table_row(own_LB[0], sequence.block_table)
                own_LB[1:] = own_LB[0]
