"""MXFP4 (OCP Microscaling v1.0: E2M1 elements, E8M0 scale per 32) in plain torch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Half-way points between neighbouring magnitudes.
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_EXPONENT_BIAS = 127
# The largest magnitude 6 = 1.5 * 2^2: the shared exponent is that of the group's maximum less two.
_LARGEST_EXPONENT = 2

# Both values of a packed byte [256, 2], and the power of two of a scale byte [256, 1].
_PAIRS = torch.tensor([(E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]) for byte in range(256)])
_POWERS = torch.tensor([2.0 ** (byte - _EXPONENT_BIAS) for byte in range(255)] + [math.nan])[:, None]


def mxfp4_dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed u8 [..., O, I/2], scale u8 [..., O, I/32] -> weight [..., O, I], exact in float32 and bfloat16."""
    pairs = F.embedding(packed.int(), _PAIRS.to(packed.device, dtype))
    powers = F.embedding(scale.int(), _POWERS.to(packed.device, dtype))
    return (pairs.flatten(-2).unflatten(-1, (-1, GROUP_SIZE)) * powers).flatten(-2)


def mxfp4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., O, I] -> (packed u8 [..., O, I/2], scale u8 [..., O, I/32]); I must be a multiple of 32.

    The scale is the smallest power of two under which the group's maximum does not saturate beyond rounding
    (maximum / scale below 7, which rounds to 6); values are rounded to nearest.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP_SIZE))
    codes, scale = _codes(groups)
    codes = codes.flatten(-2).unflatten(-1, (-1, 2))
    return (codes[..., 0] | (codes[..., 1] << 4)).to(torch.uint8), scale


def mxfp4_round(weight: Tensor) -> Tensor:
    """Nearest MXFP4 value of each entry, in weight's shape and dtype; the gradient passes straight through."""
    groups = weight.detach().float().unflatten(-1, (-1, GROUP_SIZE))
    codes, scale = _codes(groups)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=weight.device)
    rounded = torch.ldexp(table[codes.long()], (scale.int() - _EXPONENT_BIAS).unsqueeze(-1)).flatten(-2)
    return weight + (rounded.to(weight.dtype) - weight).detach()


def _codes(groups: Tensor) -> tuple[Tensor, Tensor]:
    largest = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    # largest / 2^(exponent - 1 - 2) lies in [4, 8); from 7 on it would saturate, so the scale doubles.
    exponent = exponent - 1 - _LARGEST_EXPONENT + (mantissa >= 7 / 8).int()
    scale = (exponent + _EXPONENT_BIAS).clamp(0, 254)
    scaled = torch.ldexp(groups, (_EXPONENT_BIAS - scale).unsqueeze(-1))
    boundaries = torch.tensor(_BOUNDARIES, device=groups.device)
    magnitude = torch.bucketize(scaled.abs(), boundaries)
    codes = magnitude + 8 * (scaled < 0)
    return codes.to(torch.uint8), scale.to(torch.uint8)


def mxfp4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """x [..., I] times the dequantized weight [O, I] transposed -> [..., O] in x's dtype."""
    return F.linear(x, mxfp4_dequantize(packed, scale, x.dtype))
