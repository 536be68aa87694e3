"""Drafts that are drawn rather than chosen, with the law that each was drawn from.

Numbers come from a hash of the request's seed, the round's first position, the place in it and what the number is for,
so that those which draw, those which judge and the one which ends a round are independent, in this round and any other,
and no batch changes them.
"""

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from perilune import ops
from perilune.speculative.verify import law_of


class Purpose(IntEnum):
    """What a round's numbers are for."""

    DRAW = 1
    JUDGE = 2


def numbers(seed: int, start: int, purpose: Purpose, count: int) -> list[float]:
    """`count` numbers in [0, 1) with 53 random bits for the round whose first draft is at position `start`."""
    found = []
    for place in range(count):
        packed = struct.pack("<QQQB", seed % 2**64, start, place, purpose)
        digest = hashlib.blake2b(packed, digest_size=8, person=b"drafts").digest()
        found.append((int.from_bytes(digest, "little") >> 11) * 2.0**-53)
    return found


class DrawnDrafts:
    """Draws the drafts of N requests, each under its own settings: `choose` serves `DraftModel.draft`.

    settings: per request temperature, top-k, top-p and min-p, as `ops.sample_masses` takes them; draws: per request the
    numbers of its drafts. Settings that are the target's own make the two laws, and so the acceptance, most alike.
    """

    def __init__(self, settings: Sequence[tuple[float, float, float, float]], draws: Sequence[Sequence[float]]):
        self._settings_N4 = torch.tensor(settings, dtype=torch.float64)
        self._draws_NK = torch.tensor(draws, dtype=torch.float64)
        self._laws: list[Tensor] = []

    def choose(self, index: int, logits_NV: Tensor) -> Tensor:
        """-> token ids [N] of draft `index`; -1 where a row is not finite."""
        assert index == len(self._laws), "drafts are drawn in order"
        settings = torch.cat((self._settings_N4, self._draws_NK[:, index : index + 1]), dim=1)
        token_ids, _, masses_NV = ops.sample_masses(logits_NV, settings, None)
        self._laws.append(law_of(masses_NV))
        chosen: Tensor = token_ids
        return chosen

    @property
    def laws(self) -> Tensor:
        """[N, K, V] float64: of each draft drawn so far; NaN where a row was not finite."""
        return torch.stack(self._laws, dim=1)
