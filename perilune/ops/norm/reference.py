"""Norms in plain torch, with the rounding of the released model code."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps) in float32, rounded to x's dtype, then times weight [D]."""
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
    return normed * weight


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rms(x) * weight * sigmoid(gate) over the last dim, in float32; x and gate [..., D], weight [D]."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * torch.sigmoid(gate.float())).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dim with biased variance; x [..., D] -> float32 [..., D]."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps)
