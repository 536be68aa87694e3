"""What a linear map may be given as its weight, and several weights of one input."""

from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from perilune.ops._native import address, code

# What a weight may be quantised to, and the largest number there.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Data address, address of the scales or 0, rows, columns, element type: `Matrix` of perilune.h.
MatrixTuple = tuple[int, int, int, int, int]


class ChannelScaled(NamedTuple):
    """A weight quantised per output: row o of the weight is values[o] * scale[o]."""

    values: Tensor  # int8 or float8_e4m3fn [O, I]
    scale: Tensor  # float32 [O]


def unfilled(outputs: int, columns: int, dtype: torch.dtype) -> ChannelScaled:
    """Room for a weight [outputs, columns] quantised to `dtype`."""
    return ChannelScaled(torch.empty(outputs, columns, dtype=dtype), torch.empty(outputs))


LinearWeight: TypeAlias = Tensor | ChannelScaled


def stored(weight: LinearWeight) -> Tensor:
    """The elements [O, I] as they lie in memory."""
    return weight.values if isinstance(weight, ChannelScaled) else weight


def matrix(weight: LinearWeight) -> MatrixTuple:
    """Where the native core finds a contiguous weight."""
    values = stored(weight)
    assert values.is_contiguous(), "a weight is one block of memory"
    rows, columns = values.shape
    return address(values), address(weight.scale if weight is not values else None), rows, columns, code(values)


class WeightGroup(tuple[LinearWeight, ...]):
    """Weights [O_i, I] of linear maps that read the same x.

    Remembers what every call asks about them, so it must not outlive a weight whose memory is replaced.
    """

    def __new__(cls, *weights: LinearWeight) -> "WeightGroup":
        return super().__new__(cls, weights)

    def __reduce__(self) -> tuple[type["WeightGroup"], tuple[LinearWeight, ...]]:
        return WeightGroup, tuple(self)  # a copy has addresses of its own

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(stored(weight).dtype for weight in self)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """I, then every O_i."""
        return stored(self[0]).shape[1], *(stored(weight).shape[0] for weight in self)

    @cached_property
    def matrices(self) -> list[MatrixTuple]:
        return [matrix(weight) for weight in self]

    @property
    def needs_grad(self) -> bool:
        return any(stored(weight).requires_grad for weight in self)
