"""Linear maps in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.linear.weights import LARGEST, ChannelScaled, LinearWeight, WeightGroup

# Columns of x that share a scale when it is rounded to int8.
ACTIVATION_GROUP = 32
# Below it a group or row is rounded as if its largest magnitude were this one, so that no scale's inverse overflows.
_SMALLEST = 1e-30


def dense_linear(x: Tensor, weight: LinearWeight, int8_activations: bool = False) -> Tensor:
    """x [..., I] times weight [O, I] transposed -> [..., O]."""
    if not isinstance(weight, ChannelScaled):
        return F.linear(x, weight.to(x.dtype))
    rows = x.float()
    if int8_activations and weight.values.dtype is torch.int8:
        rows = round_to_int8(rows)
    return (F.linear(rows, weight.values.float()) * weight.scale).to(x.dtype)


def linear_group(x: Tensor, weights: WeightGroup, int8_activations: bool = False) -> list[Tensor]:
    """One dense_linear each."""
    return [dense_linear(x, weight, int8_activations) for weight in weights]


def round_to_int8(x: Tensor) -> Tensor:
    """The values that int8 activations stand for: x [..., I] float32 rounded per group of columns."""
    columns = x.shape[-1]
    groups = F.pad(x, (0, -columns % ACTIVATION_GROUP)).unflatten(-1, (-1, ACTIVATION_GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST)
    limit = torch.tensor(LARGEST[torch.int8], device=x.device)  # a number over a tensor would round twice
    return ((groups * (limit / largest)).round() * (largest / limit)).flatten(-2)[..., :columns]


def quantize_rows(weight: Tensor, into: ChannelScaled) -> None:
    """weight [O, I] in 8 bits with a scale per row."""
    rows, dtype = weight.float(), into.values.dtype
    limit = torch.tensor(LARGEST[dtype], device=weight.device)
    largest = rows.abs().amax(-1).clamp_min(_SMALLEST)
    scaled = rows * (limit / largest)[:, None]
    into.values.copy_(scaled.round() if dtype is torch.int8 else scaled)
    into.scale.copy_((largest / limit).masked_fill(~rows.isfinite().all(-1), torch.nan))
