"""The lightning indexer by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.mxfp4.reference import GROUP_SIZE
from perilune.ops.packed_rows.layout import DTYPES, MXFP4, is_packed, row_bytes
from perilune.ops.packed_rows.native import row_code
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
        row_code(keys),
        (address(cu_seqlens), 0, seq_lens.shape[0]),
        heads,
        width,
        topk,
        address(selected),
    )
    return selected


def supports(key: OpKey) -> str | None:
    """Widths in multiples of 16, of 32 for MXFP4; queries and keys in float32 or in bfloat16, or keys packed."""
    _, width, _, row = key.sizes  # any number of heads, any top-k
    values = key.dtypes[2]
    reason = refusal(key, multiples=(width,))
    reason = reason or refuse_types(key, ACTIVATIONS, (torch.float32,), (key.dtypes[0], *DTYPES))
    if reason is not None:
        return reason
    if values is MXFP4 and width % GROUP_SIZE:
        return f"MXFP4 keys must be multiples of {GROUP_SIZE} wide, not {width}"
    expected = row_bytes(values, width, width) if is_packed(values) else width
    return None if row == expected else f"a key must have {expected} elements, not {row}"
