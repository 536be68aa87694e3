"""Linear maps by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.linear.weights import LARGEST, ChannelScaled, LinearWeight, WeightGroup, matrix
from perilune.ops.registry import OpKey


def dense_linear(x: Tensor, weight: LinearWeight, int8_activations: bool = False) -> Tensor:
    """See the package's contract."""
    x, own = x.contiguous(), matrix(weight)
    _, _, outputs, columns, _ = own
    y = x.new_empty((*x.shape[:-1], outputs))
    core().linear(address(x), code(x), x.numel() // columns, [own], [address(y)], int8_activations)
    return y


def linear_group(x: Tensor, weights: WeightGroup, int8_activations: bool = False) -> list[Tensor]:
    """See the package's contract."""
    x, (columns, *outputs), leading = x.contiguous(), weights.sizes, x.shape[:-1]
    tokens = x.numel() // columns
    if tokens == 1:  # a step of one sequence: one allocation costs less than many
        y = list(x.new_empty((*leading, sum(outputs))).split_with_sizes(outputs, -1))
    else:
        y = [x.new_empty((*leading, size)) for size in outputs]
    core().linear(address(x), code(x), tokens, weights.matrices, [address(own) for own in y], int8_activations)
    return y


def quantize_rows(weight: Tensor, into: ChannelScaled) -> None:
    """See the package's contract."""
    weight, (rows, columns) = weight.contiguous(), weight.shape
    values, scales, _, _, target = matrix(into)
    core().quantize_rows(address(weight), code(weight), rows, columns, target, values, scales)


def supports_dense_linear(key: OpKey) -> str | None:
    """Columns in multiples of 16."""
    return refusal(key, multiples=key.sizes[1:]) or _refuse_types(key)


def supports_linear_group(key: OpKey) -> str | None:
    """Columns in multiples of 16."""
    return refusal(key, multiples=key.sizes[:1]) or _refuse_types(key)


def supports_quantize_rows(key: OpKey) -> str | None:
    """Any row length."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, tuple(LARGEST))


def _refuse_types(key: OpKey) -> str | None:
    weights = (key.dtypes[0], torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    return refuse_types(key, ACTIVATIONS, *(weights for _ in key.dtypes[1:]))
