"""How many bytes a packed row has, and which dtypes stand for packed rows."""

import torch

from perilune.ops.mxfp4.reference import GROUP_SIZE as MXFP4_GROUP

GROUP = 128  # values of 8 bits that share a scale
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
EIGHT_BIT = tuple(LIMITS)
MXFP4 = torch.uint8
DTYPES = (*EIGHT_BIT, MXFP4)


def is_packed(dtype: torch.dtype) -> bool:
    """Whether a pool of this dtype holds packed rows; else its elements are the numbers themselves."""
    return dtype in DTYPES


def row_bytes(dtype: torch.dtype, num_scaled: int, num_columns: int) -> int:
    """Bytes of a packed row of `num_columns`, the first `num_scaled` of them quantised."""
    if dtype is MXFP4:
        assert num_scaled == num_columns
        assert num_scaled % MXFP4_GROUP == 0
        return num_scaled // 2 + num_scaled // MXFP4_GROUP
    return num_scaled + 4 * -(-num_scaled // GROUP) + 2 * (num_columns - num_scaled)
