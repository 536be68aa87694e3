"""The DSA lightning indexer of an MLA layer (K3.1): writes index keys, selects the rows a query attends to.

T tokens, D hidden size, J index heads, W index width.
"""

import torch
from torch import Tensor, nn

from perilune import ops
from perilune.cache.spec import CacheGroupSpec
from perilune.config.model import IndexerConfig, ModelConfig, NormEps
from perilune.models.inputs import ForwardBatch, row_group
from perilune.models.layers import Linear, parameter

KEY_GROUP = "index_keys"


def cache_groups(
    config: IndexerConfig, num_layers: int, values: torch.dtype | None = None
) -> tuple[CacheGroupSpec, ...]:
    """One index key per token and layer, packed with `values` if given."""
    return (row_group(KEY_GROUP, num_layers, config.head_dim, config.head_dim, values),)


class KeyNorm(nn.Module):
    """LayerNorm of the index key, weight and bias [W]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype)
        self.bias = parameter(size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, W] -> [T, W] in x's dtype."""
        y: Tensor = ops.layer_norm(x, self.weight, self.bias, self.eps)
        return y


class Indexer(nn.Module):
    """One layer's indexer. `index` counts the MLA layers before it, and addresses its keys."""

    def __init__(self, config: IndexerConfig, model: ModelConfig, eps: NormEps, index: int, dtype: torch.dtype):
        super().__init__()
        self.config, self.index = config, index
        self.wq_b = Linear(model.mla.q_lora_rank, config.num_heads * config.head_dim, dtype)
        self.wk = Linear(model.hidden_size, config.head_dim, dtype)
        self.k_norm = KeyNorm(config.head_dim, eps.indexer, dtype)
        self.weights_proj = Linear(model.hidden_size, config.num_heads, dtype)

    def forward(self, k: Tensor, head_logits: Tensor, q_latent: Tensor, batch: ForwardBatch) -> list[Tensor | None]:
        """-> per part of the batch the selected positions [t, topk].

        k [T, W] and head_logits [T, J] are what `wk` and `weights_proj` make of the layer's input, q_latent
        [T, q_lora_rank] is normed. None stands for "every row": no sequence of the part is longer than top-k. Keys
        are written all the same.
        """
        keys = batch.write_rows(KEY_GROUP, self.index, self.k_norm(k), self.config.head_dim)
        if batch.longest <= self.config.topk:
            return [None] * len(batch.parts)
        q, weights = self.queries(q_latent), self.head_weights(head_logits)
        return [
            ops.indexer_topk(
                q[part.tokens],
                weights[part.tokens],
                keys,
                part.block_table,
                part.seq_lens,
                part.cu_seqlens,
                self.config.topk,
            )
            for part in batch.parts
        ]

    def queries(self, q_latent: Tensor) -> Tensor:
        """q_latent [T, q_lora_rank] -> index queries [T, J, W]."""
        y: Tensor = self.wq_b(q_latent)
        return y.unflatten(-1, (self.config.num_heads, self.config.head_dim))

    def head_weights(self, head_logits: Tensor) -> Tensor:
        """head_logits [T, J] -> head weights [T, J] in float32, scaled by (J W)^-0.5."""
        y: Tensor = ops.scale_rows(head_logits, (self.config.num_heads * self.config.head_dim) ** -0.5)
        return y
