"""Grouped-query attention in plain torch.

Shapes: N sequences, L padded queries, S padded rows, G key heads, J query heads of each, D head width.
"""

import torch
from torch import Tensor

from perilune.ops import ragged
from perilune.ops.mla.reference import causal_mask
from perilune.ops.norm.reference import rms_norm
from perilune.ops.rotary.reference import rotate


def gqa_rows(k: Tensor, v: Tensor, k_norm: Tensor, eps: float, turns: Tensor, is_interleaved: bool) -> Tensor:
    """k, v [T, G D] -> [T, 2 G D]."""
    heads = rms_norm(k.unflatten(-1, (-1, k_norm.shape[0])), k_norm, eps)
    return torch.cat((rotate(heads, turns, is_interleaved).flatten(1), v), dim=-1)


def gqa_attention(
    q: Tensor, rows: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """q [T, G J, D] -> [T, G J, D]."""
    seq_lengths, width = ragged.lengths(cu_seqlens), q.shape[-1]
    num_kv_heads = rows.shape[-1] // (2 * width)
    q_NLGJD = ragged.pad(q, seq_lengths).unflatten(2, (num_kv_heads, -1))
    visible = ragged.gather_rows(rows, block_table, int(seq_lens.max()))
    # rows that a sequence does not own may hold anything, and 0 * nan is nan
    is_own = torch.arange(visible.shape[1], device=rows.device) < seq_lens[:, None]
    visible = visible.masked_fill(~is_own[..., None], 0.0)
    k_NSGD, v_NSGD = (part.unflatten(-1, (num_kv_heads, width)) for part in visible.chunk(2, dim=-1))
    scores = torch.einsum("nlgjd,nsgd->ngjls", q_NLGJD.float(), k_NSGD.float()) * scale
    allowed = causal_mask(seq_lengths, seq_lens, scores.shape[-2], scores.shape[-1])
    probabilities = scores.masked_fill(~allowed[:, None, None], -torch.inf).softmax(dim=-1).to(q.dtype)
    o_NLGJD = torch.einsum("ngjls,nsgd->nlgjd", probabilities, v_NSGD)
    return ragged.unpad(o_NLGJD.flatten(2, 3), seq_lengths)
