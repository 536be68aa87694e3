"""Packed rows in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops import ragged
from perilune.ops.mxfp4.reference import GROUP_SIZE, mxfp4_dequantize, mxfp4_quantize
from perilune.ops.packed_rows.layout import GROUP, LIMITS, MXFP4, is_packed

_FRACTION_BITS = 0x7FFFFF
_SMALLEST = 1e-30
_E8M0_NAN = 255


def store_packed_rows(pool: Tensor, slots: Tensor, rows: Tensor, num_scaled: int) -> None:
    """pool [..., bytes] changes in place at rows slots [T]; rows [T, D]."""
    pool.view(torch.uint8).view(-1, pool.shape[-1])[slots] = pack(rows, pool.dtype, num_scaled)


def pack(rows: Tensor, dtype: torch.dtype, num_scaled: int) -> Tensor:
    """rows [..., D] -> their bytes [..., B] as uint8."""
    scaled, further = rows[..., :num_scaled].float(), rows[..., num_scaled:]
    if dtype is MXFP4:
        return _pack_mxfp4(scaled)
    groups = F.pad(scaled, (0, -num_scaled % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)  # NaN stays one
    reach = largest.clamp_min(_SMALLEST) / LIMITS[dtype]
    scale = ((reach.view(torch.int32) + _FRACTION_BITS) & ~_FRACTION_BITS).view(torch.float32)
    is_finite = largest.isfinite()
    divided = torch.where(is_finite, groups / scale, 0.0).flatten(-2)[..., :num_scaled]
    values = divided.round().to(dtype) if dtype is torch.int8 else divided.to(dtype)
    scales = scale.where(is_finite, torch.nan).squeeze(-1)
    parts = (values, scales, further.to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def _pack_mxfp4(scaled: Tensor) -> Tensor:
    is_finite = scaled.unflatten(-1, (-1, GROUP_SIZE)).isfinite().all(-1)
    whole = is_finite.repeat_interleave(GROUP_SIZE, -1)
    values, scales = mxfp4_quantize(scaled.where(whole, 0.0))
    return torch.cat([values, scales.where(is_finite, _E8M0_NAN)], dim=-1)


def unpack(packed: Tensor, dtype: torch.dtype, num_scaled: int) -> Tensor:
    """Bytes [..., B] as uint8 of rows of a pool of `dtype` -> rows [..., D] in float32."""
    if dtype is MXFP4:
        return mxfp4_dequantize(packed[..., : num_scaled // 2], packed[..., num_scaled // 2 :])
    num_groups = -(-num_scaled // GROUP)
    parts = packed.split((num_scaled, 4 * num_groups, packed.shape[-1] - num_scaled - 4 * num_groups), dim=-1)
    values, scales, further = (part.contiguous() for part in parts)
    each = scales.view(torch.float32).repeat_interleave(GROUP, -1)[..., :num_scaled]
    return torch.cat([values.view(dtype).float() * each, further.view(torch.bfloat16).float()], dim=-1)


def gather_rows(pool: Tensor, block_table: Tensor, num_rows: int, num_scaled: int) -> Tensor:
    """First `num_rows` rows of each sequence, [N, num_rows, D]: as they lie in the pool, or unpacked in float32."""
    if not is_packed(pool.dtype):
        return ragged.gather_rows(pool, block_table, num_rows)
    return unpack(ragged.gather_rows(pool.view(torch.uint8), block_table, num_rows), pool.dtype, num_scaled)
