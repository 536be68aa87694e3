"""The lightning indexer by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.paged import pages
from perilune.ops.registry import OpKey


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    topk: int,
) -> Tensor:
    """See the package's contract."""
    q, weights, keys, block_table = q.contiguous(), weights.contiguous(), keys.contiguous(), block_table.contiguous()
    num_tokens, heads, width = q.shape
    selected = torch.empty(num_tokens, topk, dtype=torch.int64)
    core().indexer_topk(
        address(q),
        code(q),
        address(weights),
        pages(keys, block_table, seq_lens),
        code(keys),
        (address(cu_seqlens), 0, seq_lens.shape[0]),
        heads,
        width,
        topk,
        address(selected),
    )
    return selected


def supports(key: OpKey) -> str | None:
    """Index widths in multiples of 16; queries and keys in one dtype, float32 or bfloat16."""
    _, width, _ = key.sizes  # any number of heads, any top-k
    return refusal(key, multiples=(width,)) or refuse_types(key, ACTIVATIONS, (torch.float32,), (key.dtypes[0],))
