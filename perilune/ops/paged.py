"""Paged rows as the native core is told of them."""

from torch import Tensor

from perilune.ops._native import address


def pages(pool: Tensor, block_table: Tensor, seq_lens: Tensor) -> tuple[int, int, int, int, int, int]:
    """pool [blocks, block_size, W], block_table [N, B], seq_lens [N], all contiguous -> perilune.h, struct Pages."""
    row_bytes = pool.shape[2] * pool.element_size()
    return address(pool), row_bytes, pool.shape[1], address(block_table), block_table.shape[1], address(seq_lens)
