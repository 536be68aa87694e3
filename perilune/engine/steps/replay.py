"""Steps of answers alone, replayed from a recording instead of run through the model.

The inputs of such a step lie in the same tensors each time; only what is in them changes. A recording holds for the
tokens of each sequence, a width of the block table, and lengths for which the model takes the same way.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.engine.batch import ScheduledSequence
from perilune.models.inputs import ForwardBatch
from perilune.ops.recording import Arena, record, replay

_LOG = logging.getLogger(__name__)

# What a model computes once and keeps refuses its first recording.
TRIALS = 2
# Recordings of a large model take up to a megabyte each; the ones used last are kept.
_KEPT = 256
# A block table grows to this width, and then doubles, before a step is recorded anew.
NARROWEST = 16


class _Key(NamedTuple):
    num_tokens: tuple[int, ...]  # one, or those that a sequence verifies
    width: int
    way: int


@dataclass
class _Step:
    """A recorded step: its inputs, whose contents are exchanged, its program and the logits it writes."""

    batch: ForwardBatch
    program: Any
    logits: Tensor
    tables: list[tuple[int, ...]]

    def run(self, sequences: Sequence[ScheduledSequence], block_size: int) -> Tensor:
        """-> logits [T, V], overwritten by the next step."""
        batch = self.batch
        batch.token_ids.copy_(torch.tensor([token_id for sequence in sequences for token_id in sequence.token_ids]))
        batch.seq_lens.copy_(torch.tensor([sequence.seq_len for sequence in sequences]))
        batch.state_slots.copy_(torch.tensor([sequence.state_slot for sequence in sequences]))
        batch.slot_mapping.copy_(
            torch.tensor([row for sequence in sequences for row in _new_rows(sequence, block_size)])
        )
        for index, sequence in enumerate(sequences):
            if self.tables[index] != sequence.block_table:
                self.tables[index] = sequence.block_table
                fill_table_row(batch.block_table[index], sequence.block_table)
        replay(self.program)
        return self.logits


class ReplayedSteps:
    """Runs a model's steps of answers. `way(longest)` numbers the ways that the model takes by its longest sequence."""

    def __init__(self, model: Callable[[ForwardBatch], Tensor], way: Callable[[int], int], block_size: int):
        self._model = model
        self._way = way
        self._block_size = block_size
        self._arena = Arena()
        self._steps: OrderedDict[_Key, _Step] = OrderedDict()
        self._refusals: Counter[_Key] = Counter()

    def run(self, sequences: Sequence[ScheduledSequence], build: Callable[[int], ForwardBatch]) -> Tensor | None:
        """Logits [T, V] of a step, or None where it must be run as any other: it is no such step, or does not replay.

        `build(width)` makes the inputs with a block table of `width` columns.
        """
        if not all(_is_answer(sequence) for sequence in sequences):
            return None
        longest = max(sequence.seq_len for sequence in sequences)
        width = max(NARROWEST, 1 << (max(len(item.block_table) for item in sequences) - 1).bit_length())
        key = _Key(tuple(sequence.num_scheduled_tokens for sequence in sequences), width, self._way(longest))
        step = self._steps.get(key)
        if step is not None:
            self._steps.move_to_end(key)
            return step.run(sequences, self._block_size)
        return self._record(key, sequences, build(width)) if self._refusals[key] < TRIALS else None

    def _record(self, key: _Key, sequences: Sequence[ScheduledSequence], batch: ForwardBatch) -> Tensor:
        batch.prepare()
        recording = record(lambda: self._model(batch), self._arena)
        if recording.program is None:
            self._refusals[key] += 1
            _LOG.debug("steps of %s are not replayed: %s", key, recording.refusal)
        else:
            tables = [sequence.block_table for sequence in sequences]
            if len(self._steps) == _KEPT:
                self._steps.popitem(last=False)
            self._steps[key] = _Step(batch, recording.program, self._arena.alias(recording.result), tables)
        return recording.result


def fill_table_row(row_B: Tensor, blocks: Sequence[int]) -> None:
    """A sequence's blocks in order, then its own first block, never another sequence's."""
    row_B[: len(blocks)] = torch.tensor(blocks)
    row_B[len(blocks) :] = blocks[0]


def _is_answer(sequence: ScheduledSequence) -> bool:
    """Whether a sequence has the last known token, perhaps guesses behind it, and nothing else to do."""
    num_tokens = sequence.num_scheduled_tokens
    return num_tokens == 1 + sequence.num_drafts == len(sequence.logits_rows) and not sequence.seals


def _new_rows(sequence: ScheduledSequence, block_size: int) -> list[int]:
    return cache_rows(sequence.block_table, range(sequence.num_computed_tokens, sequence.seq_len), block_size)


def cache_rows(blocks: Sequence[int], positions: range, block_size: int) -> list[int]:
    """Row of each of a sequence's positions in the paged groups."""
    return [blocks[position // block_size] * block_size + position % block_size for position in positions]
