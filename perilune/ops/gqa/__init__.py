"""Grouped-query attention over paged rows. A row is one token's cached [keys of G heads | values of G heads].

gqa_rows(k, v, k_norm, eps, turns, is_interleaved) -> rows [T, 2 G D]: what is cached of k, v [T, G D]. Each head of k
    gets its rms_norm with k_norm [D] and is turned (ops.rotate) by turns [T, D]; v is passed on.
gqa_attention(q, rows, block_table, seq_lens, cu_seqlens, scale) -> o [T, H, D] in q's dtype.
    q [T, H, D], H a multiple of G: sequences end to end as cu_seqlens [N+1] says; query head h reads head h // (H / G).
    rows [blocks, block_size, 2 G D] in q's dtype; block_table [N, B]: blocks of each sequence in order; seq_lens [N]:
    rows of each sequence including this step's, so that query i of n sees rows up to seq_lens[n] - length[n] + i.
    Scores and softmax are float32, probabilities are rounded to q's dtype.
"""

from perilune.ops._native import register
from perilune.ops.gqa import native, reference
from perilune.ops.registry import Op, tensor_key

gqa_rows = Op(
    "gqa_rows",
    reference.gqa_rows,
    key=lambda k, v, k_norm, eps, turns, is_interleaved: tensor_key(
        k, v, k_norm, turns, sizes=(k.shape[-1], k_norm.shape[0])
    ),
)
gqa_attention = Op(
    "gqa_attention",
    reference.gqa_attention,
    key=lambda q, rows, block_table, seq_lens, cu_seqlens, scale: tensor_key(
        q, rows, sizes=(*q.shape[1:], rows.shape[-1])
    ),
)

register(gqa_rows, native.gqa_rows, native.supports_rows)
register(gqa_attention, native.gqa_attention, native.supports_attention)
