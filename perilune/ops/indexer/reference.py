"""Indexer scores and exact selection in plain torch.

Shapes: N sequences, L padded queries, S padded rows, J index heads, D index width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops import ragged
from perilune.ops.mla.reference import causal_mask
from perilune.ops.packed_rows.reference import gather_rows


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    topk: int,
) -> Tensor:
    """Positions of the `topk` best rows per query, ties to the lower position; see the package's contract."""
    seq_lengths = ragged.lengths(cu_seqlens)
    visible = gather_rows(keys, block_table, int(seq_lens.max()), q.shape[-1])
    scores = indexer_scores(ragged.pad(q, seq_lengths), ragged.pad(weights, seq_lengths), visible)
    allowed = causal_mask(seq_lengths, seq_lens, scores.shape[1], scores.shape[2])
    # A stable sort keeps equal scores in the order of their positions. Rows a query must not see may hold anything.
    order = scores.masked_fill(~allowed, -torch.inf).sort(dim=-1, descending=True, stable=True)
    is_missing = ~allowed.gather(-1, order.indices[..., :topk])
    past_all = scores.shape[-1]
    selected = order.indices[..., :topk].masked_fill(is_missing, past_all).sort(dim=-1).values
    selected = F.pad(selected.masked_fill(selected == past_all, -1), (0, topk - selected.shape[-1]), value=-1)
    return ragged.unpad(selected, seq_lengths)


def indexer_scores(q_NLJD: Tensor, weights_NLJ: Tensor, keys_NSD: Tensor) -> Tensor:
    """I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s]) -> float32 [N, L, S]; differentiable."""
    dots = torch.einsum("nljd,nsd->nljs", q_NLJD.float(), keys_NSD.float())
    return torch.einsum("nlj,nljs->nls", weights_NLJ, dots.relu())
