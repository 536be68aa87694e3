"""Packed rows by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, MXFP4_CODE, address, code, core, refusal, refuse_types
from perilune.ops.mxfp4.reference import GROUP_SIZE
from perilune.ops.packed_rows.layout import DTYPES, MXFP4, row_bytes
from perilune.ops.registry import OpKey


def row_code(pool: Tensor) -> int:
    """The core's number of what a pool's rows hold."""
    return MXFP4_CODE if pool.dtype is MXFP4 else code(pool)


def store_packed_rows(pool: Tensor, slots: Tensor, rows: Tensor, num_scaled: int) -> None:
    """See the package's contract."""
    rows, slots = rows.contiguous(), slots.contiguous()
    tokens, columns = rows.shape
    source = (address(rows), code(rows), tokens, columns, num_scaled, address(slots))
    core().store_packed_rows(*source, address(pool), row_code(pool), pool.shape[-1], pool.numel() // pool.shape[-1])


def supports(key: OpKey) -> str | None:
    """A pool in one piece, quantised columns in multiples of 16, of 32 for MXFP4; float32 and bfloat16."""
    columns, num_scaled, num_bytes, is_contiguous = key.sizes
    reason = refusal(key, multiples=(num_scaled,)) or refuse_types(key, DTYPES, (torch.int64,), ACTIVATIONS)
    if reason is not None:
        return reason
    dtype = key.dtypes[0]
    if dtype is MXFP4 and (num_scaled != columns or num_scaled % GROUP_SIZE):
        return f"MXFP4 rows must be quantised whole, in multiples of {GROUP_SIZE}"
    if num_bytes != row_bytes(dtype, num_scaled, columns):
        return f"a row of the pool must have {row_bytes(dtype, num_scaled, columns)} bytes, not {num_bytes}"
    return None if is_contiguous else "the pool must be contiguous"
