"""Packed rows read value by value, as ops/packed_rows describes them."""

import math
import struct

import torch

from perilune.ops.mxfp4.reference import E2M1_VALUES
from perilune.ops.packed_rows.layout import is_packed


def unpacked(pool, num_scaled):
    """A pool [blocks, block_size, ...] as rows in float64; one that is not packed as it is."""
    if not is_packed(pool.dtype):
        return pool
    raw = pool.view(torch.uint8).flatten(0, 1).tolist()
    rows = [read_row(bytes(row), pool.dtype, num_scaled) for row in raw]
    return torch.tensor(rows, dtype=torch.float64).view(*pool.shape[:2], -1)


def read_row(row, dtype, num_scaled):
    """The numbers of one row."""
    if dtype is torch.uint8:
        scales = [math.nan if byte == 255 else 2.0 ** (byte - 127) for byte in row[num_scaled // 2 :]]
        codes = [row[i // 2] >> (i % 2 * 4) & 15 for i in range(num_scaled)]
        return [E2M1_VALUES[code] * scales[i // 32] for i, code in enumerate(codes)]
    further = num_scaled + 4 * -(-num_scaled // 128)
    scales = struct.unpack(f"<{(further - num_scaled) // 4}f", row[num_scaled:further])
    read = _int8 if dtype is torch.int8 else _e4m3
    values = [read(row[i]) * scales[i // 128] for i in range(num_scaled)]
    count = (len(row) - further) // 2
    words = struct.unpack(f"<{count}H", row[further:])
    return values + [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words]


def _int8(byte):
    return byte - 256 if byte > 127 else byte


def _e4m3(byte):
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -value if byte & 128 else value
