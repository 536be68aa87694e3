"""The KDA layer: projections around one op that does all between them (Kimi Linear, section 3).

T tokens, D hidden size.
"""

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.cache.spec import CacheGroupSpec
from perilune.config.model import KDAConfig, ModelConfig, NormEps
from perilune.models.inputs import ForwardBatch
from perilune.models.layers import Linear, Projections, Weight, parameter

STATE_GROUP = "recurrent"
CONV_GROUP = "conv"


def cache_groups(config: KDAConfig, num_layers: int) -> tuple[CacheGroupSpec, ...]:
    """The states a sequence keeps in all KDA layers: S in float32, and the convolution's last inputs."""
    taps = config.short_conv_kernel_size
    return (
        CacheGroupSpec(
            STATE_GROUP, "state", num_layers, (config.num_heads, config.head_dim, config.head_dim), "float32"
        ),
        CacheGroupSpec(CONV_GROUP, "state", num_layers, (taps - 1, 3 * config.projection_size), "model"),
    )


class KimiDeltaAttention(nn.Module):
    """One KDA mixer. `index` counts the KDA layers before it, and addresses its states."""

    def __init__(self, config: ModelConfig, eps: NormEps, index: int, dtype: torch.dtype):
        super().__init__()
        kda, hidden = config.kda, config.hidden_size
        size, taps = kda.projection_size, kda.short_conv_kernel_size
        self.config, self.index = kda, index
        self.l2_eps, self.norm_eps = eps.l2, config.rms_norm_eps
        self.q_proj = Linear(hidden, size, dtype)
        self.k_proj = Linear(hidden, size, dtype)
        self.v_proj = Linear(hidden, size, dtype)
        self.q_conv1d = Weight(size, 1, taps, dtype=torch.float32)
        self.k_conv1d = Weight(size, 1, taps, dtype=torch.float32)
        self.v_conv1d = Weight(size, 1, taps, dtype=torch.float32)
        self.f_a_proj = Linear(hidden, kda.head_dim, dtype)
        self.f_b_proj = Linear(kda.head_dim, size, dtype)
        self.b_proj = Linear(hidden, kda.num_heads, dtype)
        self.g_proj = Linear(hidden, size, dtype)
        self.A_log = parameter(kda.stored_a_log_size, dtype=torch.float32)
        self.dt_bias = parameter(size, dtype=torch.float32)
        self.o_norm = Weight(kda.head_dim, dtype=torch.float32)
        self.o_proj = Linear(size, hidden, dtype)
        self.projections = Projections(self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj, self.g_proj)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, D], normed -> [T, D]; reads and writes this layer's states in `batch.cache`."""
        q, k, v, f_a, beta, gate = self.projections(x)
        o: Tensor = ops.kda_mix(
            q,
            k,
            v,
            self.f_b_proj(f_a),
            beta,
            gate,
            self.q_conv1d.weight,
            self.k_conv1d.weight,
            self.v_conv1d.weight,
            self.A_log,
            self.dt_bias,
            self.o_norm.weight,
            self.config.gate_lower_bound,
            self.l2_eps,
            self.norm_eps,
            batch.state(STATE_GROUP, self.index),
            batch.state(CONV_GROUP, self.index),
            batch.state_slots,
            batch.cu_seqlens,
        )
        y: Tensor = self.o_proj(o)
        return y
