"""Attention-residual mixing (Attention Residuals, Kimi team 2026) in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.ops.norm.reference import rms_norm


def attn_res_mix(candidates: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Softmax over candidates of rms(v) . query weighs the raw v; the mix is rounded, then RMS-normed."""
    return rms_norm(mix(candidates, query, eps), norm_weight, eps)


def mix(candidates: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """The weighted sum alone: n candidates [T, D] -> [T, D] in their dtype."""
    values = torch.stack([candidate.float() for candidate in candidates])
    scores = (values @ query) * torch.rsqrt(values.square().mean(-1) + eps)
    weights = scores.softmax(dim=0)
    return torch.einsum("nt,ntd->td", weights, values).to(candidates[-1].dtype)
