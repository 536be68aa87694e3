"""Sampling in plain torch, exact to the bit: see the package's contract."""

import torch
from torch import Tensor

NUM_SETTINGS = 5

# Below and above these a softmax in float32 is already an argmax or a uniform choice; they keep 0/0 and inf/inf away.
_LOWEST_TEMPERATURE = 1e-6
_HIGHEST_TEMPERATURE = 1e30
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def sample_tokens(logits: Tensor, settings: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [R, V], settings [R, 5], mask [R, words] -> ids [R], best [R]."""
    return sample_masses(logits, settings, mask)[:2]


def sample_masses(logits: Tensor, settings: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, V], settings [R, 5], mask [R, words] -> ids [R], best [R], masses [R, V]."""
    values = logits.float()
    if mask is not None:
        values = values.masked_fill(~_allowed(mask, values.shape[1]), -torch.inf)
    best = values.amax(-1)
    ids, masses = torch.full(best.shape, -1), torch.zeros(values.shape, dtype=torch.int64)
    for row in best.isfinite().nonzero().flatten().tolist():
        masses[row] = _kept_masses(values[row], best[row], settings[row].tolist())
        reached = masses[row].cumsum(0)
        total_mass = int(reached[-1])
        mark = min(int(float(settings[row, 4]) * float(total_mass)), total_mass - 1)
        ids[row] = int((reached > mark).nonzero()[0])
    return ids, best, masses


def penalize(
    logits: Tensor, ids: Tensor, num_prompt: int, repetition: float, frequency: float, presence: float
) -> None:
    """logits [V] float32 in place, ids [n]."""
    seen = ids.unique()
    values, factor = logits[seen], torch.tensor(repetition, dtype=torch.float32)
    logits[seen] = torch.where(values > 0, values / factor, values * factor)
    used, times = ids[num_prompt:].unique(return_counts=True)
    logits[used] -= frequency * times.float() + presence


def _allowed(mask: Tensor, size: int) -> Tensor:
    bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    return bits.flatten(1)[:, :size].bool()


def _kept_masses(logits: Tensor, best: Tensor, settings: list[float]) -> Tensor:
    temperature, top_k, top_p, min_p, _ = settings
    if temperature == 0:
        only = torch.zeros(logits.shape, dtype=torch.int64)
        only[(logits == best).nonzero()[0]] = 1
        return only
    bounded = min(max(temperature, _LOWEST_TEMPERATURE), _HIGHEST_TEMPERATURE)
    values = (logits - best) / torch.tensor(bounded, dtype=torch.float32)
    weights = exp_in_steps(values)
    masses = (weights * 2.0**40).long()
    order = values.argsort(descending=True, stable=True)
    if 0 < top_k < len(order):
        order = order[: int(top_k)]
    if top_p < 1:
        total = float(masses[order].sum())
        before = masses[order].cumsum(0) - masses[order]
        order = order[before.double() < top_p * total]
    kept = torch.zeros_like(masses)
    kept[order] = masses[order]
    kept[weights < torch.tensor(min_p, dtype=torch.float32)] = 0
    return kept


def exp_in_steps(x: Tensor) -> Tensor:
    """e^x for x <= 0 in float32, by operations whose rounding every processor agrees on; exactly 1 at 0."""
    clamped = x.clamp(min=-87.0)
    n = (clamped * 1.44269504088896341).round()
    r = clamped - n * 0.693359375
    r = r + n * 2.12194440e-4
    p = torch.full_like(r, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = p * r + coefficient
    p = p * (r * r) + r + 1.0
    power = (n.int() + 127 << 23).view(torch.float32)
    return p * power
