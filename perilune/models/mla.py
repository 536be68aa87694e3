"""The MLA layer: low-rank queries, cached latents, no rotary positions, an output gate, and in K3.1 an indexer.

T tokens, D hidden size, H heads, R latent width.
"""

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.cache.spec import CacheGroupSpec
from perilune.config.model import MLAConfig, ModelConfig, NormEps
from perilune.models.dsa import Indexer
from perilune.models.inputs import ForwardBatch, row_group
from perilune.models.layers import Linear, Projections, RMSNorm, Weight

LATENT_GROUP = "latent"


def cache_groups(config: MLAConfig, num_layers: int, values: torch.dtype | None = None) -> tuple[CacheGroupSpec, ...]:
    """One row per token and layer: the normed latent, packed with `values` if given, and the shared raw key part."""
    return (row_group(LATENT_GROUP, num_layers, config.kv_lora_rank, config.cache_width, values),)


class MultiHeadLatentAttention(nn.Module):
    """One MLA mixer. `index` counts the MLA layers before it, and addresses its rows."""

    def __init__(self, config: ModelConfig, eps: NormEps, index: int, dtype: torch.dtype):
        super().__init__()
        mla, hidden = config.mla, config.hidden_size
        self.config, self.index = mla, index
        self.q_a_proj = Linear(hidden, mla.q_lora_rank, dtype)
        self.q_a_layernorm = RMSNorm(mla.q_lora_rank, eps.latent, dtype)
        self.q_b_proj = Linear(mla.q_lora_rank, mla.num_heads * mla.qk_head_dim, dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, mla.cache_width, dtype)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps.latent, dtype)
        self.kv_b_proj = Weight(mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, dtype=dtype)
        self.g_proj = Linear(hidden, mla.num_heads * mla.v_head_dim, dtype)
        self.o_proj = Linear(mla.num_heads * mla.v_head_dim, hidden, dtype)
        self.indexer = None if config.indexer is None else Indexer(config.indexer, config, eps, index, dtype)
        further = () if self.indexer is None else (self.indexer.wk, self.indexer.weights_proj)
        self.projections = Projections(self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj, *further)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, D], normed -> [T, D]; writes this layer's rows into `batch.cache` and attends over them."""
        q_a, kv_a, gate, *index = self.projections(x)
        q_latent = self.q_a_layernorm(q_a)
        q = self.q_b_proj(q_latent).unflatten(-1, (self.config.num_heads, self.config.qk_head_dim))
        rows = batch.write_rows(LATENT_GROUP, self.index, self.latent_rows(kv_a), self.config.kv_lora_rank)
        selections = [None] * len(batch.parts) if self.indexer is None else self.indexer(*index, q_latent, batch)
        w_uk, w_uv = self.absorbed_weights()
        scale, pieces = self.config.qk_head_dim**-0.5, []
        for part, selected in zip(batch.parts, selections, strict=True):
            attend = ops.mla_decode if part.is_decode else ops.mla_prefill
            place = (part.block_table, part.seq_lens, part.cu_seqlens)
            pieces.append(attend(q[part.tokens], rows, *place, w_uk, w_uv, scale, selected).flatten(1))
        o = pieces[0] if len(pieces) == 1 else ops.join_rows(*pieces)
        y: Tensor = self.o_proj(ops.gate_rows(o, gate))
        return y

    def latent_rows(self, kv_a: Tensor) -> Tensor:
        """kv_a [T, R + shared key width], projected -> what is cached per token, of the same shape."""
        rows: Tensor = self.kv_a_layernorm(kv_a)
        return rows

    def absorbed_weights(self) -> tuple[Tensor, Tensor]:
        """Key part [H, Dn, R] and value part [H, Dv, R] of kv_b_proj, as views."""
        per_head = self.kv_b_proj.weight.unflatten(0, (self.config.num_heads, -1))
        w_uk, w_uv = per_head.split((self.config.qk_nope_head_dim, self.config.v_head_dim), dim=1)
        return w_uk, w_uv
