"""Rotary positions by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey

_INT64 = (torch.int64,)


def rotary_turns(frequencies: Tensor, factor: float, seq_lens: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """See the package's contract."""
    frequencies, num_sequences = frequencies.contiguous(), seq_lens.shape[0]
    pairs = frequencies.shape[0]
    turns = torch.empty(num_tokens, 2 * pairs)
    place = (address(seq_lens), address(cu_seqlens), num_sequences)
    core().rotary_turns(address(frequencies), pairs, factor, *place, address(turns))
    return turns


def supports_turns(key: OpKey) -> str | None:
    """Any sizes."""
    return refusal(key) or refuse_types(key, (torch.float64,), _INT64, _INT64)


def rotate(x: Tensor, turns: Tensor, is_interleaved: bool) -> Tensor:
    """See the package's contract."""
    x, turns = x.contiguous(), turns.contiguous()
    y = torch.empty_like(x)
    tokens, width, turned = x.shape[0], x.shape[-1], turns.shape[-1]
    heads = x.numel() // (tokens * width) if tokens else 0
    sizes = (tokens, heads, width, turned)
    core().rotate(address(x), code(x), *sizes, address(turns), is_interleaved, address(y))
    return y


def supports_rotate(key: OpKey) -> str | None:
    """Any sizes; float32 or bfloat16."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, (torch.float32,))
