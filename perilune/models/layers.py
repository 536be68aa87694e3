"""Parameters with the checkpoint's names around single ops: linear, norm weight, embedding."""

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.ops.linear import ChannelScaled, LinearWeight, WeightGroup


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter on the device of the surrounding `torch.device` context."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


class Linear(nn.Module):
    """y = x W^T without bias; weight [out, in] is a parameter, or what `quantise` put in its place.

    With `int8_activations` int8 weights multiply an x that is rounded to int8; others ignore it.
    """

    weight: LinearWeight

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype):
        super().__init__()
        self.int8_activations = False
        self.weight = parameter(out_features, in_features, dtype=dtype)

    def quantise(self, weight: ChannelScaled) -> None:
        """Takes a quantised weight for the parameter."""
        assert isinstance(self.weight, Tensor)
        assert weight.values.shape == self.weight.shape
        del self.weight
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y: Tensor = ops.dense_linear(x, self.weight, self.int8_activations)
        return y


class Projections:
    """Linears of one input, applied in one op. No module: the linears stay where their names are."""

    def __init__(self, *linears: Linear):
        self._linears = linears
        self._frozen: WeightGroup | None = None

    def __call__(self, x: Tensor) -> list[Tensor]:
        """x [T, in] -> [T, out] of each linear."""
        weights = self._frozen or self._weights()
        y: list[Tensor] = ops.linear_group(x, weights, self._linears[0].int8_activations)
        return y

    def _weights(self) -> WeightGroup:
        weights = WeightGroup(*(linear.weight for linear in self._linears))
        if not weights.needs_grad:  # those of a built model, which nobody replaces
            self._frozen = weights
        return weights


class Weight(nn.Module):
    """A named weight that an op of its owner reads."""

    def __init__(self, *shape: int, dtype: torch.dtype):
        super().__init__()
        self.weight = parameter(*shape, dtype=dtype)


class RMSNorm(nn.Module):
    """RMSNorm over the last dim's first entries; weight [size], and what follows them is passed on."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        y: Tensor = ops.rms_norm(x, self.weight, self.eps)
        return y


class Embedding(nn.Module):
    """Rows of weight [vocab, D], which may be stored narrower than the compute dtype."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.weight = parameter(vocab_size, size, dtype=dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, D]."""
        y: Tensor = ops.embed_rows(self.weight, token_ids, self.dtype)
        return y
