"""Linear maps y = x W^T, summed in float32 and rounded to x's dtype once.

dense_linear(x, weight, int8_activations=False) -> y: x [..., I] float32 or bfloat16; y [..., O] in x's dtype.
    weight [O, I] has x's dtype, or is bfloat16 beside a float32 x, or is a `ChannelScaled`: x is then multiplied by
    the stored values, and each output's sum by its scale.
    With `int8_activations`, and for int8 weights only, x is rounded first: in groups of 32 columns (the last may be
    shorter) to round(x * (127 / m)) * (m / 127), m the group's largest magnitude, ties to even.
linear_group(x, weights, int8_activations=False) -> [y]: dense_linear of the same x by every weight of a `WeightGroup`.

quantize_rows(weight, into): fills `into`, a ChannelScaled, from weight [O, I] float32 or bfloat16. Per row, scale is
    m / L and values are weight * (L / m) to the nearest, ties to even: m the row's largest magnitude (at least
    1e-30), L the largest number of the values' dtype, 127 or 448. A row with a number that is not finite gets the
    scale NaN.
"""

import torch
from torch import Tensor

from perilune.ops._native import register
from perilune.ops.linear import native, reference
from perilune.ops.linear.weights import ChannelScaled, LinearWeight, WeightGroup, stored
from perilune.ops.registry import Op, OpKey, tensor_key


def _key(x: Tensor, weight: LinearWeight, int8_activations: bool = False) -> OpKey:
    values = stored(weight)
    return tensor_key(x, values, sizes=values.shape)


def _group_key(x: Tensor, weights: WeightGroup, int8_activations: bool = False) -> OpKey:
    device, dtypes, _, needs_grad = tensor_key(x)
    needs_grad = needs_grad or (torch.is_grad_enabled() and weights.needs_grad)
    return OpKey(device, dtypes + weights.dtypes, weights.sizes, needs_grad)


def _quantize_key(weight: Tensor, into: ChannelScaled) -> OpKey:
    return tensor_key(weight, into.values, sizes=weight.shape)


dense_linear = Op("dense_linear", reference.dense_linear, key=_key)
linear_group = Op("linear_group", reference.linear_group, key=_group_key)
quantize_rows = Op("quantize_rows", reference.quantize_rows, key=_quantize_key)


def multiplies_bfloat16_with(dtype: torch.dtype) -> bool:
    """Whether bfloat16 weights serve activations of `dtype` as they lie; the reference widens them at every call."""
    key = OpKey("cpu", (dtype, torch.bfloat16), (16, 16), False)
    return dtype is torch.bfloat16 or dense_linear.backend(key) != "reference"


register(dense_linear, native.dense_linear, native.supports_dense_linear)
register(linear_group, native.linear_group, native.supports_linear_group)
register(quantize_rows, native.quantize_rows, native.supports_quantize_rows)

__all__ = [
    "ChannelScaled",
    "LinearWeight",
    "WeightGroup",
    "dense_linear",
    "linear_group",
    "multiplies_bfloat16_with",
    "quantize_rows",
]
