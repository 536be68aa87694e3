"""Latent attention in plain torch, plain and absorbed.

Shapes: N sequences, L padded queries, S padded rows, H heads, Dn / E query widths without / with the shared key,
R latent width, Dv value width, K selected rows.
"""

import torch
from torch import Tensor

from perilune.ops import ragged
from perilune.ops.packed_rows.reference import gather_rows


def mla_prefill(
    q: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected: Tensor | None,
) -> Tensor:
    """Plain form: every visible row becomes a key and a value per head; see the package's contract."""
    seq_lengths = ragged.lengths(cu_seqlens)
    q_NLHD = ragged.pad(q, seq_lengths)
    latent_NSR, shared_NSE = _visible_rows(rows, block_table, seq_lens, w_uk.shape[-1], q.dtype)
    k_NSHD = torch.einsum("nsr,hdr->nshd", latent_NSR, w_uk)
    v_NSHD = torch.einsum("nsr,hdr->nshd", latent_NSR, w_uv)
    qn_NLHD, qe_NLHE = q_NLHD.split((w_uk.shape[1], shared_NSE.shape[-1]), dim=-1)
    scores = torch.einsum("nlhd,nshd->nhls", qn_NLHD.float(), k_NSHD.float())
    scores = (scores + torch.einsum("nlhe,nse->nhls", qe_NLHE.float(), shared_NSE.float())) * scale
    probabilities = _softmax(scores, seq_lengths, seq_lens, selected).to(q.dtype)
    o_NLHD = torch.einsum("nhls,nshd->nlhd", probabilities, v_NSHD)
    return ragged.unpad(o_NLHD, seq_lengths)


def mla_decode(
    q: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected: Tensor | None,
) -> Tensor:
    """Absorbed form: one shared key of width R + E and one shared value of width R for all heads."""
    seq_lengths = ragged.lengths(cu_seqlens)
    q_NLHD = ragged.pad(q, seq_lengths)
    latent_NSR, shared_NSE = _visible_rows(rows, block_table, seq_lens, w_uk.shape[-1], q.dtype)
    qn_NLHD, qe_NLHE = q_NLHD.split((w_uk.shape[1], shared_NSE.shape[-1]), dim=-1)
    q_latent = torch.einsum("nlhd,hdr->nlhr", qn_NLHD, w_uk)
    scores = torch.einsum("nlhr,nsr->nhls", q_latent.float(), latent_NSR.float())
    scores = (scores + torch.einsum("nlhe,nse->nhls", qe_NLHE.float(), shared_NSE.float())) * scale
    probabilities = _softmax(scores, seq_lengths, seq_lens, selected).to(q.dtype)
    context = torch.einsum("nhls,nsr->nlhr", probabilities, latent_NSR)
    o_NLHD = torch.einsum("nlhr,hdr->nlhd", context, w_uv)
    return ragged.unpad(o_NLHD, seq_lengths)


def _visible_rows(
    rows: Tensor, block_table: Tensor, seq_lens: Tensor, latent_width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    visible = gather_rows(rows, block_table, int(seq_lens.max()), latent_width).to(dtype)
    # A sequence shorter than the longest reads rows it does not own; they may hold anything, and 0 * nan is nan.
    is_own = torch.arange(visible.shape[1], device=rows.device) < seq_lens[:, None]
    visible = visible.masked_fill(~is_own[..., None], 0.0)
    return visible[..., :latent_width], visible[..., latent_width:]


def _softmax(scores: Tensor, seq_lengths: list[int], seq_lens: Tensor, selected: Tensor | None) -> Tensor:
    """Softmax of scores [N, H, L, S] over the rows each query may see, float32."""
    allowed = causal_mask(seq_lengths, seq_lens, scores.shape[2], scores.shape[3])
    if selected is not None:
        allowed = allowed & selection_mask(ragged.pad(selected, seq_lengths), scores.shape[3])
    return scores.masked_fill(~allowed[:, None], -torch.inf).softmax(dim=-1)


def causal_mask(seq_lengths: list[int], seq_lens: Tensor, num_queries: int, num_rows: int) -> Tensor:
    """[N, L, S] bool: query i of sequence n sees rows 0 .. seq_lens[n] - seq_lengths[n] + i."""
    first = seq_lens - torch.tensor(seq_lengths, device=seq_lens.device)
    last_seen = first[:, None] + torch.arange(num_queries, device=seq_lens.device)
    return torch.arange(num_rows, device=seq_lens.device) <= last_seen[..., None]


def selection_mask(selected_NLK: Tensor, num_rows: int) -> Tensor:
    """[N, L, S] bool: the rows named in selected [N, L, K], where -1 names none."""
    mask = torch.zeros(*selected_NLK.shape[:2], num_rows + 1, dtype=torch.bool, device=selected_NLK.device)
    mask.scatter_(-1, selected_NLK.where(selected_NLK >= 0, num_rows), True)
    return mask[..., :num_rows]
