"""The DSA lightning indexer: which rows a query attends to.

indexer_topk(q, weights, keys, block_table, seq_lens, cu_seqlens, topk) -> selected.
    q [T, J, D]: index queries, sequences end to end as cu_seqlens [N+1] says; weights [T, J] f32, already scaled.
    keys [blocks, block_size, D]: paged index keys, addressed as in `ops.mla`, or packed whole (`ops.packed_rows`).
    Score of row s for query t: sum_j weights[t, j] * relu(q[t, j] . keys[s]), float32, over the rows t can see.
    selected [T, topk] int64: positions of the largest scores, ties to the lower position, in ascending order; -1 fills
    what is missing.
"""

from torch import Tensor

from perilune.ops._native import register
from perilune.ops.indexer import native, reference
from perilune.ops.registry import Op, OpKey, tensor_key


def _key(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    topk: int,
) -> OpKey:
    return tensor_key(q, weights, keys, sizes=(*q.shape[1:], topk, keys.shape[-1]))


indexer_topk = Op("indexer_topk", reference.indexer_topk, key=_key)

register(indexer_topk, native.indexer_topk, native.supports)
