"""Logits to tokens and log-probabilities, one row per request; rows never influence each other.

Order of a row: logit bias, penalties (both on the raw logits), temperature, top-k, top-p, min-p, draw. Each filter sees
what the one before it left. Randomness is a hash of (seed, position): a request gets the same tokens in any batch and
after any preemption. Log-probabilities are the model's own: before bias, penalties, temperature and filters.

Shapes: R rows, S rows that are drawn at random, V vocabulary.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.sampling.logprobs import SampledToken, SamplingFailure, TokenLogprob
from perilune.sampling.params import SamplingParams

# Below and above these a softmax in float32 is already an argmax or a uniform choice; they keep 0/0 and inf/inf away.
_LOWEST_TEMPERATURE = 1e-6
_HIGHEST_TEMPERATURE = 1e30


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know about the request behind one row of logits.

    `seed` is the request's resolved seed; with the number of output tokens it fixes the draw.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class _Draw(NamedTuple):
    row: int
    params: SamplingParams
    uniform: float


class Sampler:
    """Turns the logits of one step into tokens; keeps no state between steps."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | SamplingFailure]:
        """Choose one token per row of `logits` [R, V] (float32 or bfloat16, left as it is), in the order of `rows`."""
        assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} requests"
        if not rows:
            return []
        adjusted_RV = _adjusted(logits, rows)
        best_R, token_ids = adjusted_RV.max(dim=-1)
        # the largest value of a row is NaN or +inf if any value is, and -inf only if all are
        is_usable = best_R.isfinite().tolist()
        chosen: list[int] = token_ids.tolist()
        draws = [
            _Draw(index, row.params, uniform(row.seed, len(row.output_token_ids)))
            for index, row in enumerate(rows)
            if is_usable[index] and not row.params.is_greedy
        ]
        if draws:
            for draw, token_id in zip(draws, _drawn(adjusted_RV, draws), strict=True):
                chosen[draw.row] = token_id
        return [
            _sampled(logits[index], row, chosen[index]) if is_usable[index] else _failure(float(best_R[index]))
            for index, row in enumerate(rows)
        ]

    def prompt_logprobs(
        self, logits: Tensor, target_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprob] | SamplingFailure:
        """Log-probability of `target_ids[i]` under row i of `logits` [T, V]; one row that is not finite fails all."""
        assert logits.shape[0] == len(target_ids), f"{logits.shape[0]} rows of logits for {len(target_ids)} targets"
        entries = []
        for row_V, target_id in zip(logits, target_ids, strict=True):
            best = float(row_V.max())
            if not math.isfinite(best):
                return _failure(best)
            entries.append(token_logprob(row_V, target_id, num_top))
        return entries


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, fixed by the seed and the position in the output."""
    packed = struct.pack("<QQ", seed % 2**64, position)
    return (int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def token_logprob(logits_V: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """The entry of one token under softmax(`logits_V`) [V]; equal values rank by lower id."""
    values_V = logits_V.float()
    total = float(values_V.logsumexp(dim=-1))
    value = values_V[token_id]
    num_before = int((values_V > value).sum()) + int((values_V[:token_id] == value).sum())
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        lowest = values_V.topk(min(num_top, values_V.numel())).values[-1]
        candidates = (values_V >= lowest).nonzero().flatten()
        best, order = values_V[candidates].sort(descending=True, stable=True)
        top = tuple(
            (int(candidates[place]), float(logit) - total)
            for logit, place in zip(best[:num_top].tolist(), order[:num_top].tolist(), strict=True)
        )
    return TokenLogprob(token_id, float(value) - total, num_before + 1, top)


def _sampled(logits_V: Tensor, row: SamplingRow, token_id: int) -> SampledToken:
    num_top = row.params.logprobs
    return SampledToken(token_id, None if num_top is None else token_logprob(logits_V, token_id, num_top))


def _failure(best: float) -> SamplingFailure:
    found = "NaN" if best != best else "plus infinity" if best > 0 else "nothing but minus infinity"
    return SamplingFailure(f"the model's logits for the next token hold {found}; no token can be chosen")


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """`logits` in float32 with bias and penalties applied; a copy wherever that changes anything. [R, V]"""
    changed = [index for index, row in enumerate(rows) if row.params.logit_bias or row.params.has_penalties]
    if not changed:
        return logits.float()
    adjusted_RV = logits.to(torch.float32, copy=True)
    for index in changed:
        _adjust_row(adjusted_RV[index], rows[index])
    return adjusted_RV


def _adjust_row(logits_V: Tensor, row: SamplingRow) -> None:
    """Apply bias, then repetition, frequency and presence penalties, in place.

    Repetition counts prompt and output tokens; frequency and presence count output tokens only.
    """
    params, device = row.params, logits_V.device
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=device)
        logits_V[biased] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt_token_ids, *row.output_token_ids}), dtype=torch.int64, device=device)
        values = logits_V[seen]
        factor = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / factor, values * factor)
    if row.output_token_ids and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(row.output_token_ids)
        used = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits_V[used] -= params.frequency_penalty * times + params.presence_penalty


def _drawn(logits_RV: Tensor, draws: Sequence[_Draw]) -> list[int]:
    """One random token per draw, by inverting the cumulative distribution at the draw's uniform number."""
    device = logits_RV.device
    values_SV = logits_RV[[draw.row for draw in draws]]
    temperature_S = torch.tensor([draw.params.temperature for draw in draws], dtype=torch.float64, device=device)
    temperature_S = temperature_S.clamp(_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE).float()
    values_SV = (values_SV - values_SV.amax(dim=-1, keepdim=True)) / temperature_S[:, None]
    _keep_top_k(values_SV, [draw.params.top_k for draw in draws])
    _keep_top_p(values_SV, [draw.params.top_p for draw in draws])
    weights_SV = values_SV.exp()
    min_p_S = torch.tensor([draw.params.min_p for draw in draws], dtype=torch.float32, device=device)
    # the most probable token always survives and weighs 1, so min-p is a bound on the weight itself
    weights_SV = weights_SV.masked_fill(weights_SV < min_p_S[:, None], 0.0)
    cumulative_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    total_S = cumulative_SV[:, -1]
    target_S = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=device) * total_S
    # rounding may lift the product to the total itself, past the last token that has any weight
    target_S = torch.minimum(target_S, torch.nextafter(total_S, torch.zeros_like(total_S)))
    token_ids: list[int] = torch.searchsorted(cumulative_SV, target_S[:, None], right=True).flatten().tolist()
    return token_ids


def _keep_top_k(values_SV: Tensor, top_ks: Sequence[int]) -> None:
    """Set all but each row's `top_ks` largest values to minus infinity, in place; equal values go by lower id."""
    size = values_SV.shape[-1]
    chosen = [index for index, top_k in enumerate(top_ks) if 0 < top_k < size]
    if not chosen:
        return
    device = values_SV.device
    values_CV = values_SV[chosen]
    top_k_C = torch.tensor([top_ks[index] for index in chosen], device=device)
    largest = values_CV.topk(int(top_k_C.max()), dim=-1).values
    lowest_C1 = largest.gather(1, top_k_C[:, None] - 1)
    num_above_C1 = (values_CV > lowest_C1).sum(dim=-1, keepdim=True)
    is_tied_CV = values_CV == lowest_C1
    is_kept_CV = (values_CV > lowest_C1) | (is_tied_CV & (is_tied_CV.cumsum(dim=-1) <= top_k_C[:, None] - num_above_C1))
    values_SV[chosen] = values_CV.masked_fill(~is_kept_CV, float("-inf"))


def _keep_top_p(values_SV: Tensor, top_ps: Sequence[float]) -> None:
    """Set to minus infinity what lies outside each row's smallest most-probable set of mass `top_ps`, in place.

    A token is kept if the mass of those before it is below `top_ps`, so at least one always is.
    """
    chosen = [index for index, top_p in enumerate(top_ps) if top_p < 1]
    if not chosen:
        return
    values_CV = values_SV[chosen]
    sorted_CV, order_CV = values_CV.sort(dim=-1, descending=True, stable=True)
    weights_CV = sorted_CV.exp().double()
    cumulative_CV = weights_CV.cumsum(dim=-1)
    top_p_C1 = torch.tensor([top_ps[index] for index in chosen], dtype=torch.float64, device=values_SV.device)[:, None]
    is_dropped_CV = cumulative_CV - weights_CV >= top_p_C1 * cumulative_CV[:, -1:]
    is_dropped_CV[:, 0] = False
    dropped_CV = torch.zeros_like(is_dropped_CV).scatter(1, order_CV, is_dropped_CV)
    values_SV[chosen] = values_CV.masked_fill(dropped_CV, float("-inf"))
