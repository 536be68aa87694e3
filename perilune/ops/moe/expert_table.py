"""The experts of one layer: their tensors, and where these lie in memory."""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor


class PackedExpert(NamedTuple):
    """One expert's six tensors in the released packing."""

    w1_packed: Tensor
    w1_scale: Tensor
    w3_packed: Tensor
    w3_scale: Tensor
    w2_packed: Tensor
    w2_scale: Tensor


class DenseExpert(NamedTuple):
    """One expert stored without packing: w1, w3 [I, D], w2 [D, I]."""

    w1: Tensor
    w3: Tensor
    w2: Tensor


E = TypeVar("E", bound=PackedExpert | DenseExpert)


class ExpertTable(tuple[E, ...]):
    """E experts of one kind and shape, every tensor contiguous.

    Immutable, so that the addresses are gathered once and not in every step.
    """

    @classmethod
    def dense(cls, w1: Iterable[Tensor], w3: Iterable[Tensor], w2: Iterable[Tensor]) -> "ExpertTable[DenseExpert]":
        """From E tensors [I, D], [I, D], [D, I], or one stacked tensor each; gradients reach these."""
        columns = (weights.unbind() if isinstance(weights, Tensor) else weights for weights in (w1, w3, w2))
        return ExpertTable(DenseExpert(*weights) for weights in zip(*columns, strict=True))

    @cached_property
    def is_packed(self) -> bool:
        """Whether the experts are `PackedExpert`s."""
        return isinstance(self[0], PackedExpert)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(E, I, D): experts, inner width, width of their input and output."""
        inner, columns = self[0][0].shape
        return len(self), inner, 2 * columns if self.is_packed else columns

    @property
    def sample(self) -> Tensor:
        """A tensor of the weights' dtype."""
        return self[0][0]

    @cached_property
    def addresses(self) -> Tensor:
        """int64 [E, 6]: addresses of data and scales of w1, w3, w2; a dense weight's scales are at 0."""
        assert all(tensor.is_contiguous() for expert in self for tensor in expert)
        rows = [[tensor.data_ptr() for tensor in expert] for expert in self]
        if not self.is_packed:
            rows = [[w1, 0, w3, 0, w2, 0] for w1, w3, w2 in rows]
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        return type(self), (tuple(self),)  # a copy has addresses of its own
