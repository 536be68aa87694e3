"""The gated MLP with SiTU: dense layers and shared experts."""

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.models.layers import Linear, Projections


class MLP(nn.Module):
    """down(situ(gate(x), up(x)))."""

    def __init__(self, hidden: int, inner: int, beta: float, linear_beta: float, dtype: torch.dtype):
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta
        self.gate_proj = Linear(hidden, inner, dtype)
        self.up_proj = Linear(hidden, inner, dtype)
        self.down_proj = Linear(inner, hidden, dtype)
        self.projections = Projections(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        return self.finish(*self.projections(x))

    def finish(self, gate: Tensor, up: Tensor) -> Tensor:
        """What follows the two projections of x; gate, up [T, inner] -> [T, D]."""
        y: Tensor = self.down_proj(ops.situ(gate, up, self.beta, self.linear_beta))
        return y
