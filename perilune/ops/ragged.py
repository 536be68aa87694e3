"""Sequences of different lengths laid end to end, and the padded rectangle that plain torch computes on."""

from itertools import pairwise

import torch
from torch import Tensor


def lengths(cu_seqlens: Tensor) -> list[int]:
    """Lengths of the sequences that `cu_seqlens` [N+1] delimits."""
    bounds = cu_seqlens.tolist()
    return [end - start for start, end in pairwise(bounds)]


def pad(x: Tensor, seq_lengths: list[int], multiple: int = 1) -> Tensor:
    """[T, ...] -> [N, L, ...] with zeros after each sequence; L is the longest length rounded up to `multiple`."""
    longest = -(-max(seq_lengths) // multiple) * multiple
    if all(length == longest for length in seq_lengths):
        return x.view(len(seq_lengths), longest, *x.shape[1:])
    rows = torch.split(x, seq_lengths)
    out = x.new_zeros(len(seq_lengths), longest, *x.shape[1:])
    for index, row in enumerate(rows):
        out[index, : row.shape[0]] = row
    return out


def unpad(x: Tensor, seq_lengths: list[int]) -> Tensor:
    """[N, L, ...] -> [T, ...], the inverse of `pad`."""
    if all(length == x.shape[1] for length in seq_lengths):
        return x.reshape(-1, *x.shape[2:])
    return torch.cat([x[index, :length] for index, length in enumerate(seq_lengths)])


def gather_rows(pool: Tensor, block_table: Tensor, num_rows: int) -> Tensor:
    """First `num_rows` rows of each sequence: pool [blocks, block_size, W], block_table [N, B] -> [N, num_rows, W]."""
    block_size = pool.shape[1]
    num_blocks = -(-num_rows // block_size)
    rows = pool[block_table[:, :num_blocks].long()]
    return rows.flatten(1, 2)[:, :num_rows]
