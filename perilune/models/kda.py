"""The KDA layer: projections around one op that does all between them (Kimi Linear, section 3).

T tokens, D hidden size.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.cache.spec import CacheDtype, CacheGroupSpec
from perilune.config.model import KDAConfig, ModelConfig, NormEps
from perilune.models.inputs import ForwardBatch, Part
from perilune.models.layers import Linear, Projections, Weight, parameter
from perilune.ops.kda import KdaRecords

STATE_GROUP = "recurrent"
CONV_GROUP = "conv"
RECORD_GROUPS = ("record_inputs", "record_keys", "record_decays", "record_corrections")


def cache_groups(config: KDAConfig, num_layers: int) -> tuple[CacheGroupSpec, ...]:
    """The states a sequence keeps in all KDA layers: S in float32, and the convolution's last inputs."""
    taps = config.short_conv_kernel_size
    return (
        CacheGroupSpec(
            STATE_GROUP, "state", num_layers, (config.num_heads, config.head_dim, config.head_dim), "float32"
        ),
        CacheGroupSpec(CONV_GROUP, "state", num_layers, (taps - 1, 3 * config.projection_size), "model"),
    )


def record_groups(config: KDAConfig, num_layers: int) -> tuple[CacheGroupSpec, ...]:
    """What a token that may be taken back leaves in all KDA layers until it is committed, as seats of one token."""
    heads = (config.num_heads, config.head_dim)
    shapes = ((3 * config.projection_size,), heads, heads, heads)
    dtypes: tuple[CacheDtype, ...] = ("model", "model", "float32", "float32")
    return tuple(
        CacheGroupSpec(name, "state", num_layers, shape, dtype)
        for name, shape, dtype in zip(RECORD_GROUPS, shapes, dtypes, strict=True)
    )


def commit(
    cache: Mapping[str, Tensor], records: Mapping[str, Tensor], state_slots: Tensor, cu_seqlens: Tensor, counts: Tensor
) -> None:
    """The states of all layers take the first counts[n] [N] tokens of each verified sequence, from its records."""
    own = KdaRecords(*(records[name] for name in RECORD_GROUPS))
    ops.kda_commit(cache[STATE_GROUP], cache[CONV_GROUP], own, state_slots, cu_seqlens, counts)


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
        given, pieces = (q, k, v, self.f_b_proj(f_a), beta, gate), []
        for part, copies in batch.rounds:
            own = _rows_of(part, given)
            pieces.append(ops.kda_mix(*own, *self._weights(), *self._place(batch, part)))
            for group in (STATE_GROUP, CONV_GROUP):
                batch.seal_states(group, self.index, copies)
        if batch.verified is not None:
            own, place = _rows_of(batch.verified, given), self._place(batch, batch.verified)
            pieces.append(ops.kda_verify(*own, *self._weights(), *place, self._records(batch)))
        y: Tensor = self.o_proj(pieces[0] if len(pieces) == 1 else ops.join_rows(*pieces))
        return y

    def _weights(self) -> tuple[Tensor | float, ...]:
        return (
            self.q_conv1d.weight,
            self.k_conv1d.weight,
            self.v_conv1d.weight,
            self.A_log,
            self.dt_bias,
            self.o_norm.weight,
            self.config.gate_lower_bound,
            self.l2_eps,
            self.norm_eps,
        )

    def _place(self, batch: ForwardBatch, part: Part) -> tuple[Tensor | None, ...]:
        states = batch.state(STATE_GROUP, self.index), batch.state(CONV_GROUP, self.index)
        return *states, part.state_slots, part.cu_seqlens

    def _records(self, batch: ForwardBatch) -> KdaRecords:
        return KdaRecords(*(batch.record(name, self.index) for name in RECORD_GROUPS))


def _rows_of(part: Part, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor[part.tokens] for tensor in tensors]
