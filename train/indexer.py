"""Teaches the indexer: its scores learn to follow the dense model's attention (DeepSeek-V3.2, warm-up stage).

The loss is the KL divergence from the head-averaged attention to the softmax of the scores. Inputs are detached, so
only the indexer learns from it.
"""

from typing import Any

import torch
from torch import Tensor

from perilune.models.inputs import ForwardBatch
from perilune.models.mla import MultiHeadLatentAttention
from perilune.models.model import KimiModel
from perilune.ops.indexer.reference import indexer_scores


class IndexerTeacher:
    """Collects the indexer loss of every forward pass over whole sequences, on some of the batch's sequences."""

    def __init__(self, model: KimiModel, num_sequences: int):
        self._num_sequences = num_sequences
        self._losses: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, MultiHeadLatentAttention):
                module.register_forward_hook(self._observe)

    def take_loss(self) -> Tensor:
        """Mean over layers and rows of the losses since the last call; forgets them."""
        loss = torch.stack(self._losses).mean()
        self._losses.clear()
        return loss

    def _observe(self, module: MultiHeadLatentAttention, arguments: tuple[Any, ...], _: Tensor) -> None:
        x, batch = arguments
        assert isinstance(batch, ForwardBatch)
        assert module.indexer is not None
        length = int(batch.seq_lens[0])
        count = min(self._num_sequences, batch.seq_lens.shape[0])
        with torch.no_grad():
            x = x[: count * length].detach()
            q_latent = module.q_a_layernorm(module.q_a_proj(x))
            target = _mean_attention(module, x, q_latent, count)
        indexer = module.indexer
        queries, weights, keys = (
            y.unflatten(0, (count, length))
            for y in (
                indexer.queries(q_latent),
                indexer.head_weights(indexer.weights_proj(x)),
                indexer.k_norm(indexer.wk(x)),
            )
        )
        scores = indexer_scores(queries, weights, keys)
        scores = scores.masked_fill(~_causal(length), -torch.inf).log_softmax(dim=-1)
        divergence = target * (target.clamp_min(1e-9).log() - scores.masked_fill(~_causal(length), 0.0))
        self._losses.append(divergence.sum(-1).mean())


def _mean_attention(module: MultiHeadLatentAttention, x: Tensor, q_latent: Tensor, count: int) -> Tensor:
    config = module.config
    rows = module.latent_rows(module.kv_a_proj_with_mqa(x))
    latent, shared = rows.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
    q = module.q_b_proj(q_latent).unflatten(-1, (config.num_heads, config.qk_head_dim)).unflatten(0, (count, -1))
    w_uk, _ = module.absorbed_weights()
    keys = torch.einsum("tr,hdr->thd", latent, w_uk).unflatten(0, (count, -1))
    scores = torch.einsum("nlhd,nshd->nhls", q[..., : config.qk_nope_head_dim], keys)
    scores = scores + torch.einsum(
        "nlhe,nse->nhls", q[..., config.qk_nope_head_dim :], shared.unflatten(0, (count, -1))
    )
    scores = (scores * config.qk_head_dim**-0.5).masked_fill(~_causal(scores.shape[-1]), -torch.inf)
    return scores.softmax(dim=-1).mean(dim=1)


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()
