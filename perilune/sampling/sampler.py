"""Logits to tokens and log-probabilities, one row per request; rows never influence each other.

Order of a row: logit bias, penalties (both on the raw logits), mask, temperature, top-k, top-p, min-p, draw. Each
filter sees what the one before it left. Randomness is a hash of (seed, position): a request gets the same tokens in any
batch and after any preemption. Log-probabilities are the model's own: before bias, penalties, mask, temperature and
filters.

Shapes: R rows, V vocabulary.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perilune import ops
from perilune.sampling.logprobs import SampledToken, SamplingFailure, TokenLogprob
from perilune.sampling.params import SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know about the request behind one row of logits.

    `seed` is the request's resolved seed; with the number of output tokens it fixes the draw.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: Sequence[int]


class _Prompt(NamedTuple):
    """A prompt, which keeps its identity its own, and its ids int64 [P]."""

    token_ids: tuple[int, ...]
    ids: Tensor


class Sampler:
    """Turns the logits of one step into tokens; keeps nothing between steps but prompts that penalties count."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}  # by identity, those of the last step

    def sample(
        self, logits: Tensor, rows: Sequence[SamplingRow], mask: Tensor | None = None
    ) -> list[SampledToken | SamplingFailure]:
        """Choose one token per row of `logits` [R, V] (float32 or bfloat16, left as it is), in the order of `rows`.

        mask int32 [R, ceil(V / 32)] or None: bit i % 32 of word i // 32 allows token i; a row without limits is -1.
        """
        assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} requests"
        if not rows:
            return []
        settings = torch.tensor([_settings(row, logits.shape[1]) for row in rows], dtype=torch.float64)
        token_ids, best = ops.sample_tokens(self._adjusted(logits, rows), settings, mask)
        return [
            _failure(value) if token_id < 0 else sampled_token(logits[index], row, token_id)
            for index, (row, token_id, value) in enumerate(zip(rows, token_ids.tolist(), best.tolist(), strict=True))
        ]

    def masses(
        self, logits: Tensor, rows: Sequence[SamplingRow], mask: Tensor | None = None
    ) -> tuple[Tensor, list[SamplingFailure | None]]:
        """What `sample` draws from: int64 [R, V], each token's weight in its row; and why a row has none.

        Arguments as there; logits of at least one row.
        """
        settings = torch.tensor([_settings(row, logits.shape[1]) for row in rows], dtype=torch.float64)
        token_ids, best, masses = ops.sample_masses(self._adjusted(logits, rows), settings, mask)
        pairs = zip(token_ids.tolist(), best.tolist(), strict=True)
        return masses, [_failure(value) if token_id < 0 else None for token_id, value in pairs]

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

    def _adjusted(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """`logits` with bias and penalties applied, in a float32 copy where that changes anything. [R, V]"""
        changed = [index for index, row in enumerate(rows) if row.params.logit_bias or row.params.has_penalties]
        last, self._prompts = self._prompts, {}
        if not changed:
            return logits
        adjusted_RV = logits.to(torch.float32, copy=True)
        for index in changed:
            row, key, prompt = rows[index], id(rows[index].prompt_token_ids), None
            if row.params.has_penalties:
                prompt = self._prompts.get(key) or last.get(key)
                prompt = prompt or _Prompt(row.prompt_token_ids, _id_tensor(row.prompt_token_ids))
                self._prompts[key] = prompt
            _adjust_row(adjusted_RV[index], row, prompt)
        return adjusted_RV


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, fixed by the seed and the position in the output."""
    packed = struct.pack("<QQ", seed % 2**64, position)
    return (int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _settings(row: SamplingRow, vocab_size: int) -> tuple[float, ...]:
    params = row.params
    number = 0.0 if params.is_greedy else uniform(row.seed, len(row.output_token_ids))
    return params.temperature, min(params.top_k, vocab_size), params.top_p, params.min_p, number


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


def sampled_token(logits_V: Tensor, row: SamplingRow, token_id: int) -> SampledToken:
    """A token chosen in this row, with what its request wants to know of it."""
    num_top = row.params.logprobs
    return SampledToken(token_id, None if num_top is None else token_logprob(logits_V, token_id, num_top))


def _failure(best: float) -> SamplingFailure:
    found = "NaN" if best != best else "plus infinity" if best > 0 else "nothing but minus infinity"
    return SamplingFailure(f"the model's logits for the next token hold {found}; no token can be chosen")


def _adjust_row(logits_V: Tensor, row: SamplingRow, prompt: _Prompt | None) -> None:
    """Apply bias, then repetition, frequency and presence penalties, in place.

    Repetition counts prompt and output tokens; frequency and presence count output tokens only.
    """
    params, device = row.params, logits_V.device
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=device)
        logits_V[biased] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
    if prompt is not None:
        ids = torch.cat([prompt.ids, _id_tensor(row.output_token_ids)]).to(device)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        ops.penalize(logits_V, ids, len(row.prompt_token_ids), *penalties)


def _id_tensor(token_ids: Sequence[int]) -> Tensor:
    """int64 [T]; a third of the time of `torch.tensor`, which looks at every number's type."""
    return torch.from_numpy(np.array(array("q", token_ids)))
