"""The two kinds of attention of draft models, each with what it caches of a row.

T rows, D hidden size.
"""

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.config.draft import DraftConfig, GQAConfig
from perilune.config.model import MLAConfig
from perilune.models.draft.block import DraftBlocks
from perilune.models.layers import Linear, Projections, RMSNorm, Weight


class LatentAttention(nn.Module):
    """MLA with rotary positions and without an output gate."""

    def __init__(self, config: DraftConfig, index: int, dtype: torch.dtype):
        super().__init__()
        mla, hidden, eps = config.attention, config.hidden_size, config.rms_norm_eps
        assert isinstance(mla, MLAConfig)
        self.config, self.index = mla, index
        self.is_interleaved = config.rope.is_interleaved
        self.scale = mla.qk_head_dim**-0.5 * config.rope.latent_score_factor
        self.q_a_proj = Linear(hidden, mla.q_lora_rank, dtype)
        self.q_a_layernorm = RMSNorm(mla.q_lora_rank, eps, dtype)
        self.q_b_proj = Linear(mla.q_lora_rank, mla.num_heads * mla.qk_head_dim, dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, mla.cache_width, dtype)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps, dtype)
        self.kv_b_proj = Weight(mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, dtype=dtype)
        self.o_proj = Linear(mla.num_heads * mla.v_head_dim, hidden, dtype)
        self.projections = Projections(self.q_a_proj, self.kv_a_proj_with_mqa)

    @property
    def cached_linears(self) -> tuple[Linear, ...]:
        """The linears whose outputs `rows` takes."""
        return (self.kv_a_proj_with_mqa,)

    def rows(self, kv_a: Tensor, turns: Tensor) -> Tensor:
        """kv_a [T, R + shared key width] -> what is cached of it, of the same shape."""
        rows: Tensor = ops.rotate(self.kv_a_layernorm(kv_a), turns, self.is_interleaved)
        return rows

    def forward(self, x: Tensor, blocks: DraftBlocks) -> Tensor:
        """x [T, D], normed -> [T, D]; writes the rows of its blocks and attends over them and their context."""
        q_a, kv_a = self.projections(x)
        q = self.q_b_proj(self.q_a_layernorm(q_a)).unflatten(-1, (self.config.num_heads, self.config.qk_head_dim))
        pool = blocks.write(self.index, self.rows(kv_a, blocks.turns))
        per_head = self.kv_b_proj.weight.unflatten(0, (self.config.num_heads, -1))
        weights = per_head.split((self.config.qk_nope_head_dim, self.config.v_head_dim), dim=1)
        q = ops.rotate(q, blocks.turns, self.is_interleaved)
        o: Tensor = ops.mla_decode(q, pool, *blocks.place, *weights, self.scale, None)
        y: Tensor = self.o_proj(o.flatten(1))
        return y


class GroupedAttention(nn.Module):
    """GQA with a norm per head on q and k."""

    def __init__(self, config: DraftConfig, index: int, dtype: torch.dtype):
        super().__init__()
        gqa, hidden = config.attention, config.hidden_size
        assert isinstance(gqa, GQAConfig)
        self.config, self.index, self.eps = gqa, index, config.rms_norm_eps
        self.is_interleaved = config.rope.is_interleaved
        wide, narrow = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
        self.q_proj = Linear(hidden, wide, dtype)
        self.k_proj = Linear(hidden, narrow, dtype)
        self.v_proj = Linear(hidden, narrow, dtype)
        self.o_proj = Linear(wide, hidden, dtype)
        self.q_norm = RMSNorm(gqa.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = Weight(gqa.head_dim, dtype=dtype)
        self.projections = Projections(self.q_proj, self.k_proj, self.v_proj)

    @property
    def cached_linears(self) -> tuple[Linear, ...]:
        """The linears whose outputs `rows` takes."""
        return self.k_proj, self.v_proj

    def rows(self, k: Tensor, v: Tensor, turns: Tensor) -> Tensor:
        """k, v [T, G D] -> what is cached of them, [T, 2 G D]."""
        rows: Tensor = ops.gqa_rows(k, v, self.k_norm.weight, self.eps, turns, self.is_interleaved)
        return rows

    def forward(self, x: Tensor, blocks: DraftBlocks) -> Tensor:
        """x [T, D], normed -> [T, D]; writes the rows of its blocks and attends over them and their context."""
        q, k, v = self.projections(x)
        pool = blocks.write(self.index, self.rows(k, v, blocks.turns))
        q = self.q_norm(q.unflatten(-1, (self.config.num_heads, self.config.head_dim)))
        q = ops.rotate(q, blocks.turns, self.is_interleaved)
        o: Tensor = ops.gqa_attention(q, pool, *blocks.place, self.config.head_dim**-0.5)
        y: Tensor = self.o_proj(o.flatten(1))
        return y
