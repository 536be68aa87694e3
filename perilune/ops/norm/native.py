"""Norms by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the package's contract."""
    x = x.contiguous()
    y, stride, columns = torch.empty_like(x), x.shape[-1], weight.shape[0]
    rows = x.numel() // stride
    own = (address(weight), code(weight), eps)
    core().rms_norm(address(x), code(x), rows, columns, stride, *own, address(y), stride - columns)
    return y


def supports_rms_norm(key: OpKey) -> str | None:
    """Any row length; float32 or bfloat16, weight of x's dtype."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, (key.dtypes[0],))


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """See the package's contract."""
    x, gate, weight = x.contiguous(), gate.contiguous(), weight.contiguous()
    y, columns = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // columns
    core().gated_rms_norm(address(x), address(gate), code(x), rows, columns, address(weight), eps, address(y))
    return y


def supports_gated_rms_norm(key: OpKey) -> str | None:
    """Any row length; x and gate float32 or bfloat16, both the same."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, (torch.float32,), (key.dtypes[0],))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See the package's contract."""
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.to(weight.dtype).contiguous()
    y, columns = torch.empty_like(x), x.shape[-1]
    core().layer_norm(
        address(x),
        code(x),
        x.numel() // columns,
        columns,
        address(weight),
        address(bias),
        code(weight),
        eps,
        address(y),
    )
    return y


def supports_layer_norm(key: OpKey) -> str | None:
    """Any row length; float32 or bfloat16 in any mixture."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, ACTIVATIONS)
