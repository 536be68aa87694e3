"""Context rows of the draft that plain steps leave for later, since nobody reads them before the next guess.

They are written before anything but another such step, in the order of the steps: whatever reads, moves or saves cached
rows finds them all, and a block that has another owner by then gets that owner's rows last.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from perilune.engine.batch import ScheduledBatch, ScheduledSequence
from perilune.engine.steps.replay import cache_rows
from perilune.models.draft.tapped import MOST_OWED, TappedModel


class OwedRows:
    """Decides before each step whether `model` writes its context rows into `cache` or owes them."""

    def __init__(self, model: TappedModel, cache: Mapping[str, Tensor], block_size: int):
        self._model = model
        self._cache = cache
        self._block_size = block_size
        self._sequences: list[ScheduledSequence] = []
        self._running: Sequence[ScheduledSequence] = ()

    def switch(self, *, is_on: bool) -> None:
        """Whether context rows are left at all; of answers that run they are missing where they were not."""
        self.write()
        self._model.is_blind, self._model.owes = not is_on, False

    def begin(self, batch: ScheduledBatch, *, has_guesses: bool) -> None:
        """To be called before a step does anything; `has_guesses` says that it makes or verifies some."""
        if self._model.is_blind:
            return
        sequences = batch.sequences
        owes = not (has_guesses or batch.moves or batch.transfers) and _is_plain(sequences)
        if self._running or not owes or len(self._sequences) + len(sequences) > MOST_OWED:
            self.write()
        self._model.owes = owes and len(sequences) <= MOST_OWED
        self._running = sequences if self._model.owes else ()

    def end(self) -> None:
        """To be called when the step has succeeded."""
        self._sequences += self._running
        self._running = ()

    def write(self) -> None:
        """Writes what is owed, but for what a step owes that failed."""
        if not self._sequences and not self._running:
            return
        positions = [sequence.num_computed_tokens for sequence in self._sequences]
        rows = [
            row
            for sequence, position in zip(self._sequences, positions, strict=True)
            for row in cache_rows(sequence.block_table, range(position, position + 1), self._block_size)
        ]
        self._sequences, self._running = [], ()
        with torch.inference_mode():
            self._model.write_owed(_integers(positions), _integers(rows), self._cache)


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _is_plain(sequences: Sequence[ScheduledSequence]) -> bool:
    """Whether all have one token; those with more come last."""
    return len(sequences) > 0 and len(sequences[-1].token_ids) == 1
