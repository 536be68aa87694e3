"""Cached rows in 8 or 4 bits a value. The pool's dtype says what lies in the bytes of a row:

    float8_e4m3fn, int8: [values S | float32 scale per 128 values | further columns in bfloat16]; E4M3 or integers.
    uint8: MXFP4, [pairs S / 2, low nibble first | E8M0 scale per 32 values], as in `ops.mxfp4`; no further columns.

A scale is a power of two, so that a value, read back, is one exact bfloat16 number. Of 8 bits it is the smallest under
which the group's largest magnitude lies within 448 or 127. A group with a number that is not finite reads as NaN.

store_packed_rows(pool, slots, rows, num_scaled): row slots[t] of pool [..., bytes], counted over all leading dims,
    becomes rows[t] [T, D] with its first `num_scaled` columns quantised, each rounded once to the nearest; in place.
"""

from torch import Tensor

from perilune.ops._native import register
from perilune.ops.packed_rows import native, reference
from perilune.ops.registry import Op, OpKey, tensor_key


def _key(pool: Tensor, slots: Tensor, rows: Tensor, num_scaled: int) -> OpKey:
    return tensor_key(pool, slots, rows, sizes=(rows.shape[-1], num_scaled, pool.shape[-1], pool.is_contiguous()))


store_packed_rows = Op("store_packed_rows", reference.store_packed_rows, key=_key)

register(store_packed_rows, native.store_packed_rows, native.supports)
