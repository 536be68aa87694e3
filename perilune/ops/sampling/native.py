"""Sampling by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey


def sample_tokens(logits: Tensor, settings: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """See the package's contract."""
    return _sample(logits, settings, mask, None)


def sample_masses(logits: Tensor, settings: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """See the package's contract."""
    masses = torch.empty(logits.shape, dtype=torch.int64)
    return *_sample(logits, settings, mask, masses), masses


def _sample(logits: Tensor, settings: Tensor, mask: Tensor | None, masses: Tensor | None) -> tuple[Tensor, Tensor]:
    logits, settings = logits.contiguous(), settings.contiguous()
    mask = None if mask is None else mask.contiguous()
    rows, columns = logits.shape
    ids, best = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    given = (address(logits), code(logits), rows, columns, address(mask), address(settings))
    core().sample_tokens(*given, address(ids), address(best), address(masses))
    return ids, best


def supports_sample_tokens(key: OpKey) -> str | None:
    """float32 or bfloat16 logits, any sizes."""
    masks = ((torch.int32,),) if len(key.dtypes) == 3 else ()
    return refusal(key) or refuse_types(key, ACTIVATIONS, (torch.float64,), *masks)


def penalize(
    logits: Tensor, ids: Tensor, num_prompt: int, repetition: float, frequency: float, presence: float
) -> None:
    """See the package's contract."""
    ids = ids.contiguous()
    penalties = (repetition, frequency, presence)
    core().penalize(address(logits), logits.shape[0], address(ids), ids.shape[0], num_prompt, *penalties)


def supports_penalize(key: OpKey) -> str | None:
    """Contiguous logits."""
    if not key.sizes[0]:
        return "the logits must be contiguous"
    return refusal(key) or refuse_types(key, (torch.float32,), (torch.int64,))
