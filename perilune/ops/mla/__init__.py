"""Latent attention over paged rows. A row is one token's cached [latent R | shared key part E].

mla_prefill(q, rows, block_table, seq_lens, cu_seqlens, w_uk, w_uv, scale, selected) -> o: expands keys and values.
mla_decode(same) -> o: absorbed form; queries are brought into the latent space instead.
    q [T, H, Dn + E]: sequences end to end as cu_seqlens [N+1] says; the last E values meet the shared key part.
    rows [blocks, block_size, R + E], or packed (`ops.packed_rows`) with the R quantised.
    block_table [N, B]: blocks of each sequence in order; seq_lens [N]: rows of each sequence including this step's, so
    query i of n has position seq_lens[n] - length[n] + i and sees rows up to it.
    w_uk [H, Dn, R] and w_uv [H, Dv, R]: key and value parts of kv_b_proj. scale multiplies the scores.
    selected [T, K] int64 or None: positions a query may attend to, -1 for none; None means all it can see.
    o [T, H, Dv] in q's dtype. Scores and softmax are float32, probabilities are rounded to q's dtype.
"""

from torch import Tensor

from perilune.ops._native import register
from perilune.ops.mla import native, reference
from perilune.ops.registry import Op, OpKey, tensor_key


def _key(
    q: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    selected: Tensor | None,
) -> OpKey:
    return tensor_key(q, rows, w_uk, w_uv, sizes=(*w_uk.shape, w_uv.shape[1], q.shape[-1], rows.shape[-1]))


mla_prefill = Op("mla_prefill", reference.mla_prefill, key=_key)
mla_decode = Op("mla_decode", reference.mla_decode, key=_key)

register(mla_prefill, native.mla_prefill, native.supports)
register(mla_decode, native.mla_decode, native.supports)
