"""A target and its draft as one model to whoever runs passes: every pass also leaves the draft's context rows."""

import torch
from torch import Tensor

from perilune import ops
from perilune.cache.spec import CacheGroupSpec
from perilune.models.draft.model import DraftModel
from perilune.models.inputs import ForwardBatch
from perilune.models.model import KimiModel


class TappedModel:
    """The target's passes, whose streams after the tapped layers become context rows of `draft`."""

    def __init__(self, target: KimiModel, draft: DraftModel):
        self.target, self.draft = target, draft
        self._places = {layer: place for place, layer in enumerate(draft.config.target_layer_ids)}
        # by power of two: recorded passes read them where they are
        self._slots: dict[int, Tensor] = {}

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """Those of the target and of the draft."""
        return (*self.target.cache_groups(), *self.draft.cache_groups())

    def way(self, longest: int) -> int:
        """As the target's."""
        return self.target.way(longest)

    def take_faults(self) -> dict[int, str]:
        """As the target's."""
        return self.target.take_faults()

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """-> the target's logits [R, vocab]; writes the rows of both models into `batch.cache`."""
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

    def _slots_for(self, num_tokens: int) -> Tensor:
        """[taps, at least num_tokens]: the row of [tokens * taps] for a token's stream after a tapped layer."""
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._slots:
            self._slots[size] = torch.arange(len(self._places) * size).view(size, -1).T.contiguous()
        return self._slots[size]
