"""From logits to tokens.

sample_tokens(logits, settings, mask) -> (ids, best): one token per row of logits [R, V] float32 or bfloat16.
    settings [R, 5] float64: temperature (0 takes the best), top-k (0 is off), top-p in (0, 1], min-p in [0, 1], and the
    number in [0, 1) that draws. mask int32 [R, ceil(V / 32)] or None: bit i % 32 of word i // 32 allows token i.
    ids [R] int64; best [R] float32, the largest allowed logit, NaN if one of them is. Where best is not finite the id
    is -1.

    A row that draws: value = (logit - best) / temperature, weight = e^value in float32, its mass floor(weight * 2^40).
    Tokens stand in falling order of value, equal ones by rising id. top-k keeps the first k; top-p the first ones whose
    mass reaches top-p times the mass of those; min-p those that weigh at least min-p. Drawn is the first token, in
    rising order of id, at which the kept mass passes floor(number * all kept mass). Every implementation computes
    e^x by the same float32 operations, and sums of masses are exact, so that all choose the same token.

sample_masses(logits, settings, mask) -> (ids, best, masses): the same, and masses [R, V] int64 of the tokens that a row
    draws among, 0 for all others, so that token i is drawn with the probability masses[i] / sum of masses. A row that
    takes the best has mass 1 there; one whose best is not finite has none.

penalize(logits, ids, num_prompt, repetition, frequency, presence): changes logits [V] float32 in place.
    ids [n] int64: the prompt's num_prompt tokens, then the output's. Each token among them is divided by `repetition`
    where positive, else multiplied; those of the output, standing there c times, lose frequency * c + presence.
"""

import torch

from perilune.ops._native import register
from perilune.ops.registry import Op, OpKey, tensor_key
from perilune.ops.sampling import native, reference
from perilune.ops.sampling.reference import NUM_SETTINGS


def _key(logits: torch.Tensor, settings: torch.Tensor, mask: torch.Tensor | None) -> OpKey:
    return tensor_key(logits, settings, mask)


sample_tokens = Op("sample_tokens", reference.sample_tokens, key=_key)
sample_masses = Op("sample_masses", reference.sample_masses, key=_key)
penalize = Op(
    "penalize",
    reference.penalize,
    key=lambda logits, ids, num_prompt, repetition, frequency, presence: tensor_key(
        logits, ids, sizes=(logits.is_contiguous(),)
    ),
)

register(sample_tokens, native.sample_tokens, native.supports_sample_tokens)
register(sample_masses, native.sample_masses, native.supports_sample_tokens)
register(penalize, native.penalize, native.supports_penalize)

__all__ = ["NUM_SETTINGS", "penalize", "sample_masses", "sample_tokens"]
