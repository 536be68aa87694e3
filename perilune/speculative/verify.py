"""Which drafted tokens stay, and the token after them: rules under which what is emitted has the target's own law.

A round verifies K drafts at once: row i of the target's logits judges draft i, and row K yields the token after them
all. The target's law of a row is what plain sampling would draw from there: after bias, penalties, mask, temperature
and filters. How many drafts are verified must not depend on drafts that are not yet verified.

`accept_matching` serves drafts that were not drawn (the best of a draft model, copies of earlier text): plain sampling
chooses a token for every row, and drafts stay while they are that token. Nothing is rejected that another rule could
keep, since a certain draft is kept with its probability under the target at most; and the tokens are the very ones
that plain sampling gives with the same seed. `accept_tokens` (Leviathan et al. 2023) and `accept_block` (Sun et al.
2024) serve drafts that were drawn from a known law.

K drafts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """The first `num_accepted` drafts are emitted, then `token_id`."""

    num_accepted: int
    token_id: int


def accept_matching(target_ids: Sequence[int], draft_ids: Sequence[int]) -> Verdict:
    """target_ids [K+1]: what plain sampling chose for each row; draft_ids [K]."""
    assert len(target_ids) == len(draft_ids) + 1
    for index, draft_id in enumerate(draft_ids):
        if target_ids[index] != draft_id:
            return Verdict(index, target_ids[index])
    return Verdict(len(draft_ids), target_ids[-1])


def accept_tokens(target: Tensor, draft: Tensor, draft_ids: Sequence[int], uniforms: Sequence[float]) -> Verdict:
    """Draft by draft: kept with probability min(1, p / q); after the first rejection a token of max(p - q, 0).

    target [K+1, V] and draft [K, V]: probabilities float64, row i of `draft` the law that draft i was drawn from.
    uniforms [K+1] in [0, 1), independent of each other and of the drafts.
    """
    for index, draft_id in enumerate(draft_ids):
        p, q = float(target[index, draft_id]), float(draft[index, draft_id])
        if not uniforms[index] * q < p:
            return Verdict(index, _draw((target[index] - draft[index]).clamp(min=0), target[index], uniforms[-1]))
    return Verdict(len(draft_ids), _draw(target[-1], target[-1], uniforms[-1]))


def accept_block(target: Tensor, draft: Tensor, draft_ids: Sequence[int], uniforms: Sequence[float]) -> Verdict:
    """The longest prefix that passes a joint test; on average it keeps no fewer drafts than `accept_tokens`.

    Arguments as there. With r_i = min(1, r_{i-1} p_i / q_i) a prefix of i < K drafts passes with the probability
    s / (s + 1 - r_i), s the sum of max(r_i p - q, 0) over row i; all K pass with r_K.
    """
    num_drafts, reached = len(draft_ids), 1.0
    num_accepted, share = 0, 1.0
    for index, draft_id in enumerate(draft_ids):
        p, q = float(target[index, draft_id]), float(draft[index, draft_id])
        reached = min(1.0, reached * p / q) if q > 0 else float(p > 0) * reached
        chance = reached
        if index + 1 < num_drafts:
            left = float((reached * target[index + 1] - draft[index + 1]).clamp(min=0).sum())
            chance = left / (left + 1 - reached) if left + 1 - reached > 0 else 1.0
        if uniforms[index] < chance:
            num_accepted, share = index + 1, reached
    if num_accepted == num_drafts:
        return Verdict(num_accepted, _draw(target[-1], target[-1], uniforms[-1]))
    law = target[num_accepted]
    return Verdict(num_accepted, _draw((share * law - draft[num_accepted]).clamp(min=0), law, uniforms[-1]))


def law_of(masses: Tensor) -> Tensor:
    """Probabilities float64 of `ops.sample_masses`' masses [..., V]."""
    weights = masses.double()
    return weights / weights.sum(-1, keepdim=True)


def _draw(weights_V: Tensor, fallback_V: Tensor, uniform: float) -> int:
    """A token by its weight; where rounding left no weight at all, by `fallback_V`."""
    reached = weights_V.cumsum(0)
    if not float(reached[-1]) > 0:
        weights_V, reached = fallback_V, fallback_V.cumsum(0)
    index = int(torch.searchsorted(reached, uniform * reached[-1], right=True))
    # a product rounded up to the total would point behind the last token that has weight
    return min(index, int(weights_V.nonzero()[-1]))
