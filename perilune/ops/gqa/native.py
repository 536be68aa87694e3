"""Grouped-query attention by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.paged import pages
from perilune.ops.registry import OpKey


def gqa_rows(k: Tensor, v: Tensor, k_norm: Tensor, eps: float, turns: Tensor, is_interleaved: bool) -> Tensor:
    """See the package's contract."""
    k, v, k_norm, turns = k.contiguous(), v.contiguous(), k_norm.contiguous(), turns.contiguous()
    tokens, size = k.shape
    width = k_norm.shape[0]
    rows = k.new_empty(tokens, 2 * size)
    norm = (address(k_norm), code(k_norm), eps)
    core().gqa_rows(
        address(k),
        address(v),
        code(k),
        tokens,
        size // width,
        width,
        *norm,
        address(turns),
        is_interleaved,
        address(rows),
    )
    return rows


def supports_rows(key: OpKey) -> str | None:
    """Any sizes; float32 or bfloat16."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, key.dtypes[:1], ACTIVATIONS, (torch.float32,))


def gqa_attention(
    q: Tensor, rows: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """See the package's contract."""
    q, rows, block_table = q.contiguous(), rows.contiguous(), block_table.contiguous()
    _, heads, width = q.shape
    o = torch.empty_like(q)
    sequences = (address(cu_seqlens), 0, seq_lens.shape[0])
    sizes = (heads, rows.shape[-1] // (2 * width), width)
    core().gqa_attention(address(q), code(q), pages(rows, block_table, seq_lens), sequences, *sizes, scale, address(o))
    return o


def supports_attention(key: OpKey) -> str | None:
    """Head width a multiple of 16; float32 or bfloat16, both the same."""
    return refusal(key, multiples=key.sizes[1:2]) or refuse_types(key, ACTIVATIONS, key.dtypes[:1])
