"""The short convolution by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey

MAX_TAPS = 8


def short_conv(x: Tensor, weight: Tensor, state: Tensor | None, state_slots: Tensor, cu_seqlens: Tensor) -> Tensor:
    """See the package's contract; rows of x may lie apart."""
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = weight.contiguous()
    channels, taps = weight.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    kept = None if state is None else state.contiguous()
    sequences = (address(cu_seqlens), address(state_slots), cu_seqlens.numel() - 1)
    core().short_conv(
        address(x),
        code(x),
        channels,
        taps,
        x.stride(0),
        address(weight),
        address(kept),
        code(x if kept is None else kept),
        sequences,
        address(y),
    )
    if state is not None and kept is not state:
        state.copy_(kept)
    return y


def supports_short_conv(key: OpKey) -> str | None:
    """float32 or bfloat16, channels a multiple of 16, up to 8 taps."""
    channels, taps = key.sizes
    if taps > MAX_TAPS:
        return f"takes up to {MAX_TAPS} taps, not {taps}"
    types = (ACTIVATIONS, (torch.float32,), ACTIVATIONS)[: len(key.dtypes)]
    return refusal(key, multiples=(channels,)) or refuse_types(key, *types)
