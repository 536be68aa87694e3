"""Rotary positions in plain torch."""

import torch
from torch import Tensor

from perilune.ops import ragged


def rotary_turns(frequencies: Tensor, factor: float, seq_lens: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """frequencies [P], seq_lens [N], cu_seqlens [N+1] -> [T, 2 P]."""
    assert int(cu_seqlens[-1]) == num_tokens
    positions = [
        torch.arange(end - length, end)
        for end, length in zip(seq_lens.tolist(), ragged.lengths(cu_seqlens), strict=True)
    ]
    angles = torch.cat(positions).double()[:, None] * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).float()


def rotate(x: Tensor, turns: Tensor, is_interleaved: bool) -> Tensor:
    """x [T, ..., W], turns [T, 2 P] -> [T, ..., W]."""
    width = turns.shape[-1]
    turned = x[..., x.shape[-1] - width :].float()
    cos, sin = (part.view(-1, *[1] * (x.dim() - 2), width // 2) for part in turns.chunk(2, dim=-1))
    if is_interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        y = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((x[..., : x.shape[-1] - width], y.to(x.dtype)), dim=-1)
