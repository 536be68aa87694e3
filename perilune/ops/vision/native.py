"""The ops of the vision tower by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey


def patch_attention(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, queries: slice) -> Tensor:
    """See the package's contract."""
    qkv, cos, sin, cu_seqlens = (x.contiguous() for x in (qkv, cos, sin, cu_seqlens))
    num_patches, _, heads, width = qkv.shape
    first, end, _ = queries.indices(num_patches)
    o = qkv.new_empty(end - first, heads, width)
    core().patch_attention(
        address(qkv),
        code(qkv),
        heads,
        width,
        address(cos),
        address(sin),
        address(cu_seqlens),
        cu_seqlens.shape[0] - 1,
        width**-0.5,
        first,
        end,
        address(o),
    )
    return o


def supports_patch_attention(key: OpKey) -> str | None:
    """Heads of a width in multiples of 16; float32 or bfloat16."""
    _, width = key.sizes
    return refusal(key, multiples=(width,)) or refuse_types(key, ACTIVATIONS, (torch.float32,), (torch.float32,))


def gelu_tanh(x: Tensor) -> Tensor:
    """See the package's contract."""
    x = x.contiguous()
    y = torch.empty_like(x)
    core().gelu_tanh(address(x), code(x), x.numel(), address(y))
    return y


def supports_gelu_tanh(key: OpKey) -> str | None:
    """Any shape; float32 or bfloat16."""
    return refusal(key) or refuse_types(key, ACTIVATIONS)
