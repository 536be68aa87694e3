"""A draft's pass over many blocks at once, differentiable: what `perilune.models.draft` computes, in plain torch.

B sequences of L tokens, A anchors in each, K drafts of a block, D hidden size, V vocabulary, R latent width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune import ops
from perilune.config.model import MLAConfig
from perilune.models.draft.attention import LatentAttention
from perilune.models.draft.model import DraftModel


@dataclass(frozen=True)
class Blocks:
    """Where blocks lie: their anchors [B, A] as positions in sequences of `length` tokens."""

    anchors: Tensor
    length: int
    num_rows: int

    @property
    def seen(self) -> Tensor:
        """bool [B, A * K, L + A * K]: a row sees the tokens before its anchor, and the rows of its own block."""
        (batch, count), rows = self.anchors.shape, self.num_rows
        before = torch.arange(self.length) < self.anchors[..., None]
        before = before[:, :, None].expand(batch, count, rows, self.length).flatten(1, 2)
        block = torch.arange(count).repeat_interleave(rows)
        own = (block[:, None] == block).expand(batch, -1, -1)
        return torch.cat((before, own), dim=-1)


def draft_hidden(draft: DraftModel, taps: Tensor, token_ids: Tensor, blocks: Blocks) -> Tensor:
    """taps [B, L, layers * D], token_ids [B, L] -> normed hidden states [B, A, K, D] of the blocks' rows.

    The draft is of the MLA shape with blocks whose rows all see each other.
    """
    assert draft.config.is_latent
    assert not draft.config.is_causal
    (batch, count), rows = blocks.anchors.shape, blocks.num_rows
    context = draft.context(taps.flatten(0, 1))
    ids = torch.full((batch, count, rows), draft.config.mask_token_id)
    ids[..., 0] = token_ids.gather(1, blocks.anchors)
    embedding = draft._shared[0]
    x = embedding(ids.flatten()).float()
    lengths = torch.full((batch,), blocks.length)
    context_turns = ops.rotary_turns(
        draft.frequencies,
        draft.config.rope.table_factor,
        lengths,
        torch.arange(batch + 1) * blocks.length,
        batch * blocks.length,
    )
    block_turns = draft.turns(blocks.anchors.flatten() + rows, rows)
    seen = blocks.seen
    for layer in draft.layers:
        attention = layer.self_attn
        own = attention.rows(attention.kv_a_proj_with_mqa(context), context_turns)
        x = x + _attend(attention, layer.input_layernorm(x), own, block_turns, seen)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    hidden: Tensor = draft.final_norm(x).view(batch, count, rows, -1)
    return hidden


def _attend(attention: LatentAttention, x: Tensor, context: Tensor, turns: Tensor, seen: Tensor) -> Tensor:
    """x [B * A * K, D], the cached rows of the context [B * L, W] -> [B * A * K, D]."""
    mla = attention.config
    assert isinstance(mla, MLAConfig)
    batch = seen.shape[0]
    q_a, kv_a = attention.projections(x)
    q = attention.q_b_proj(attention.q_a_layernorm(q_a)).unflatten(-1, (mla.num_heads, mla.qk_head_dim))
    q = ops.rotate(q, turns, attention.is_interleaved).view(batch, -1, mla.num_heads, mla.qk_head_dim)
    block = attention.rows(kv_a, turns).view(batch, -1, mla.cache_width)
    keys = torch.cat((context.view(batch, -1, mla.cache_width), block), dim=1)
    latent, shared = keys.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
    per_head = attention.kv_b_proj.weight.unflatten(0, (mla.num_heads, -1))
    to_key, to_value = per_head.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=1)
    q_nope, q_rope = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
    scores = torch.einsum("bthn,hnr,bsr->bhts", q_nope, to_key, latent)
    scores = (scores + torch.einsum("bthp,bsp->bhts", q_rope, shared)) * attention.scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    o = torch.einsum("bhts,bsr,hvr->bthv", weights, latent, to_value)
    y: Tensor = attention.o_proj(o.flatten(2).flatten(0, 1))
    return y


def draft_logits(draft: DraftModel, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
    """hidden [B, A, K, D] and the tokens before each draft, previous [B, A, K] -> corrected logits [B, A, K, V].

    With them comes the confidence head's logit [B, A, K], if there is that head; it does not train the rest.
    """
    head = draft._shared[1]
    rows, bias = draft.markov_head(previous.flatten())
    logits = head(hidden.flatten(0, 2)).float() + bias
    confidence = None
    if draft.config.has_confidence_head:
        confidence = draft.confidence_head(hidden.flatten(0, 2).detach(), rows.detach()).view(previous.shape)
    return logits.view(*previous.shape, -1), confidence
