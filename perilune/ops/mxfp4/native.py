"""MXFP4 linear by the native core, from the released packing."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, MXFP4_CODE, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey

_BYTES = (torch.uint8,)


def mxfp4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """See the package's contract."""
    x, packed, scale = x.contiguous(), packed.contiguous(), scale.contiguous()
    outputs, columns = packed.shape[0], 2 * packed.shape[1]
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
    matrix = (address(packed), address(scale), outputs, columns, MXFP4_CODE)
    core().linear(address(x), code(x), x.numel() // columns, [matrix], [address(y)], False)
    return y


def supports_mxfp4_linear(key: OpKey) -> str | None:
    """Any size that the packing has; float32 or bfloat16 activations."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, _BYTES, _BYTES)
