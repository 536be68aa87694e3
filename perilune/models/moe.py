"""The latent mixture of experts: down to the latent, route, experts, norm, up, plus the shared experts.

T tokens, D hidden size, R latent size, E experts, K chosen.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.config.model import ModelConfig
from perilune.models.layers import Linear, Projections, RMSNorm, parameter
from perilune.models.mlp import MLP
from perilune.ops.moe import DenseExpert, ExpertTable, PackedExpert, StreamedTable
from perilune.ops.mxfp4.reference import mxfp4_round


class Router(nn.Module):
    """Sigmoid router over the full hidden size; the correction bias serves the choice only."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        moe = config.moe
        self.num_chosen, self.renormalize, self.scaling = (
            moe.num_experts_per_token,
            moe.moe_renormalize,
            moe.routed_scaling_factor,
        )
        self.weight = parameter(moe.num_experts, config.hidden_size, dtype=dtype)
        self.e_score_correction_bias = parameter(moe.num_experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> expert ids [T, K], weights [T, K] float32."""
        ids, weights = ops.moe_route(
            x, self.weight, self.e_score_correction_bias, self.num_chosen, self.renormalize, self.scaling
        )
        return ids, weights


class Experts(nn.Module):
    """The routed experts of a loaded checkpoint: a table, not parameters, so that a large model builds quickly.

    With `int8_activations` packed experts multiply int8 activations; others ignore it.
    """

    def __init__(self, config: ModelConfig, experts: Iterable[PackedExpert] | Iterable[DenseExpert]):
        super().__init__()
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.int8_activations = False
        self.table = ExpertTable(experts)

    def forward(self, z: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """z [T, R] -> weighted sum of the chosen experts [T, R]."""
        given = (z, expert_ids, expert_weights, self.table, self.beta, self.linear_beta)
        if self.table.is_packed:
            packed: Tensor = ops.moe_experts_mxfp4(*given, self.int8_activations)
            return packed
        dense: Tensor = ops.moe_experts(*given)
        return dense


class StreamedExperts(nn.Module):
    """The routed experts of a layer in the files of the checkpoint, some of them in memory."""

    def __init__(self, config: ModelConfig, table: StreamedTable):
        super().__init__()
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.int8_activations = False
        self.table = table

    def forward(self, z: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """z [T, R] -> weighted sum of the chosen experts [T, R]."""
        given = (z, expert_ids, expert_weights, self.table, self.beta, self.linear_beta, self.int8_activations)
        y: Tensor = ops.moe_experts_mxfp4(*given)
        return y


class TrainableExperts(nn.Module):
    """Stacked experts as parameters. With `rounds_weights` the forward pass sees them as MXFP4 will store them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        moe = config.moe
        count, inner, latent = moe.num_experts, moe.moe_intermediate_size, moe.routed_expert_hidden_size
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.rounds_weights = True
        self.w1 = parameter(count, inner, latent, dtype=dtype)
        self.w3 = parameter(count, inner, latent, dtype=dtype)
        self.w2 = parameter(count, latent, inner, dtype=dtype)

    def forward(self, z: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """z [T, R] -> weighted sum of the chosen experts [T, R]."""
        weights = (self.w1, self.w3, self.w2)
        seen = map(mxfp4_round, weights) if self.rounds_weights else weights
        table = ExpertTable.dense(*seen)
        y: Tensor = ops.moe_experts(z, expert_ids, expert_weights, table, self.beta, self.linear_beta)
        return y


class LatentMoE(nn.Module):
    """One MoE feed-forward. The norm follows the weighted sum, so ranks must combine before it."""

    def __init__(self, config: ModelConfig, experts: nn.Module, dtype: torch.dtype):
        super().__init__()
        moe, hidden, latent = config.moe, config.hidden_size, config.moe.routed_expert_hidden_size
        betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.gate = Router(config, dtype)
        self.routed_expert_down_proj = Linear(hidden, latent, dtype)
        self.experts = experts
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, dtype)
        self.routed_expert_up_proj = Linear(latent, hidden, dtype)
        self.shared_experts = shared = MLP(hidden, moe.shared_intermediate_size, *betas, dtype)
        self.projections = Projections(self.routed_expert_down_proj, shared.gate_proj, shared.up_proj)

    def expect(self, x: Tensor) -> None:
        """Begin to read the streamed experts that tokens x [T, D], normed, would choose."""
        assert isinstance(self.experts, StreamedExperts)
        self.experts.table.fetch(self.gate(x)[0], is_certain=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D], normed -> [T, D]."""
        expert_ids, expert_weights = self.gate(x)
        if isinstance(self.experts, StreamedExperts):
            self.experts.table.fetch(expert_ids, is_certain=True)
        # all that needs no routed expert comes first, while they may be read
        z, gate, up = self.projections(x)
        shared = self.shared_experts.finish(gate, up)
        routed = self.experts(z, expert_ids, expert_weights)
        up_routed = self.routed_expert_up_proj(self.routed_expert_norm(routed))
        y: Tensor = ops.add_rows(up_routed, shared)
        return y
