"""Norms by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the package's contract."""
    x = x.contiguous()
    y, columns = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // columns
    core().rms_norm(address(x), code(x), rows, columns, columns, address(weight), code(weight), eps, address(y))
    return y


def supports_rms_norm(key: OpKey) -> str | None:
    """Any row length; float32 or bfloat16, weight of x's dtype."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, (key.dtypes[0],))
