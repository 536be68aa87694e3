"""Norms in plain torch, with the rounding of the released model code."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., W] / sqrt(mean(x^2) + eps) in float32, rounded to x's dtype, times weight [W]; further columns follow."""
    width = weight.shape[0]
    normed = F.rms_norm(x[..., :width].float(), (width,), eps=eps).to(x.dtype) * weight
    return normed if x.shape[-1] == width else torch.cat((normed, x[..., width:]), dim=-1)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rms(x) * weight * sigmoid(gate) over the last dim, in float32; x and gate [..., D], weight [D]."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * torch.sigmoid(gate.float())).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dim with biased variance; x [..., D] -> [..., D] in x's dtype."""
    y = F.layer_norm(x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps)
    return y.to(x.dtype)
