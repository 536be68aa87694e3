"""A target and its draft as one model to whoever runs passes: every pass also leaves the draft's context rows.

One-token passes may put that off: then their streams are kept, and the context rows of many passes written at once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from perilune import ops
from perilune.cache.spec import CacheGroupSpec
from perilune.config.draft import DraftConfig
from perilune.models.draft.model import DraftModel
from perilune.models.inputs import ForwardBatch
from perilune.models.model import KimiModel

# Tokens whose context rows can be put off: enough for writing them to cost each pass next to nothing.
MOST_OWED = 256


def owed_bytes(config: DraftConfig, itemsize: int) -> int:
    """Bytes kept for rows that are put off, in a compute dtype of `itemsize` bytes."""
    return MOST_OWED * len(config.target_layer_ids) * config.hidden_size * itemsize


class TappedModel:
    """The target's passes, whose streams after the tapped layers become context rows of `draft`."""

    def __init__(self, target: KimiModel, draft: DraftModel):
        self.target, self.draft = target, draft
        self._places = {layer: place for place, layer in enumerate(draft.config.target_layer_ids)}
        # by power of two: recorded passes read them where they are
        self._slots: dict[int, Tensor] = {}
        num_taps, hidden = len(self._places), draft.config.hidden_size
        self._owed = torch.empty(num_taps, MOST_OWED, hidden, dtype=draft.dtype)
        self._num_owed = torch.zeros(num_taps, 1, dtype=torch.int64)
        self.owes = False
        self.is_blind = False

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """Those of the target and of the draft."""
        return (*self.target.cache_groups(), *self.draft.cache_groups())

    def way(self, longest: int) -> int:
        """As the target's; passes that owe their context rows, or leave none, take others."""
        return 3 * self.target.way(longest) + (2 if self.is_blind else self.owes)

    def take_faults(self) -> dict[int, str]:
        """As the target's."""
        return self.target.take_faults()

    def write_owed(self, positions: Tensor, cache_rows: Tensor, cache: Mapping[str, Tensor]) -> None:
        """Writes the rows that were owed first, given where each token stands [T] and is cached [T], both int64.

        Nothing is owed then; what a pass that failed owes besides is forgotten.
        """
        self._num_owed.zero_()
        num_tokens = positions.shape[0]
        if num_tokens == 0:
            return
        taps = self._owed[:, :num_tokens].transpose(0, 1).flatten(1)
        batch = ForwardBatch(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64),
            cu_seqlens=torch.arange(num_tokens + 1),
            seq_lens=positions + 1,
            block_table=torch.empty(num_tokens, 0, dtype=torch.int64),
            slot_mapping=cache_rows,
            state_slots=torch.empty(0, dtype=torch.int64),
            num_decodes=num_tokens,
            logits_rows=torch.empty(0, dtype=torch.int64),
            cache=cache,
        )
        self.draft.write_context(taps, batch)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """-> the target's logits [R, vocab]; writes the rows of both models into `batch.cache`.

        While it `owes`, the draft's are put off; at most `MOST_OWED` can be. While it `is_blind`, there are none.
        """
        if self.is_blind:
            return self.target(batch)
        if self.owes:
            return self.target(batch, self._put_off)
        num_tokens, num_taps = batch.token_ids.shape[0], len(self._places)
        slots = self._slots_for(num_tokens)
        taps = torch.empty(num_tokens, num_taps, self.draft.config.hidden_size, dtype=self.draft.dtype)

        def tap(layer: int, prefix: Tensor) -> None:
            place = self._places.get(layer)
            if place is not None:
                ops.store_rows(taps, slots[place, :num_tokens], prefix)

        logits = self.target(batch, tap)
        self.draft.write_context(taps.view(num_tokens, -1), batch)
        return logits

    def _put_off(self, layer: int, prefix: Tensor) -> None:
        place = self._places.get(layer)
        if place is not None:
            ops.append_rows(self._owed[place], self._num_owed[place], prefix)

    def _slots_for(self, num_tokens: int) -> Tensor:
        """[taps, at least num_tokens]: the row of [tokens * taps] for a token's stream after a tapped layer."""
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._slots:
            self._slots[size] = torch.arange(len(self._places) * size).view(size, -1).T.contiguous()
        return self._slots[size]
