"""KDA by the native core."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.conv.native import MAX_TAPS
from perilune.ops.registry import OpKey

_FLOAT32 = (torch.float32,)


def kda_decay(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """See the package's contract."""
    z, a_log, dt_bias = z.contiguous(), a_log.contiguous(), dt_bias.contiguous()
    g = torch.empty_like(z, dtype=torch.float32)
    core().kda_decay(address(z), code(z), *z.shape, address(a_log), address(dt_bias), lower_bound, address(g))
    return g


def supports_decay(key: OpKey) -> str | None:
    """Any heads and width; logits float32 or bfloat16."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, _FLOAT32, _FLOAT32)


def kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    l2_eps: float,
    state: Tensor | None,
    state_slots: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """See the package's contract."""
    return _attend(core().kda_recurrent, q, k, v, g, beta, l2_eps, state, state_slots, cu_seqlens)


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    l2_eps: float,
    state: Tensor | None,
    state_slots: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """See the package's contract."""
    return _attend(core().kda_chunk, q, k, v, g, beta, l2_eps, state, state_slots, cu_seqlens)


def _attend(
    kernel: Callable[..., None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    l2_eps: float,
    state: Tensor | None,
    state_slots: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    _, heads, width = q.shape
    q, k, v = _dense_tokens(q), _dense_tokens(k), _dense_tokens(v)
    g, beta = g.contiguous(), beta.contiguous()
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    kept = None if state is None else state.contiguous()
    kernel(
        address(q),
        address(k),
        address(v),
        code(q),
        heads,
        width,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        address(g),
        address(beta),
        l2_eps,
        address(kept),
        (address(cu_seqlens), address(state_slots), cu_seqlens.numel() - 1),
        address(o),
    )
    if state is not None and kept is not state:
        state.copy_(kept)
    return o


def _dense_tokens(x: Tensor) -> Tensor:
    """x [T, H, D] whose heads lie side by side; tokens may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def supports_attention(key: OpKey) -> str | None:
    """float32 or bfloat16, width a multiple of 16; decay, beta and state float32."""
    own = key.dtypes[:1]
    types: list[tuple[Any, ...]] = [ACTIVATIONS, own, own, *[_FLOAT32] * (len(key.dtypes) - 3)]
    return refusal(key, multiples=key.sizes[1:]) or refuse_types(key, *types)


def kda_mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    q_conv: Tensor,
    k_conv: Tensor,
    v_conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    o_norm: Tensor,
    lower_bound: float,
    l2_eps: float,
    norm_eps: float,
    state: Tensor | None,
    conv_state: Tensor | None,
    state_slots: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """See the package's contract."""
    q, k, v, z, beta, gate = (x.contiguous() for x in (q, k, v, z, beta, gate))
    q_conv, k_conv, v_conv = q_conv.contiguous(), k_conv.contiguous(), v_conv.contiguous()
    a_log, dt_bias, o_norm = a_log.contiguous(), dt_bias.contiguous(), o_norm.contiguous()
    o = torch.empty_like(q)
    kept = None if state is None else state.contiguous()
    kept_conv = None if conv_state is None else conv_state.contiguous()
    core().kda_mix(
        address(q),
        address(k),
        address(v),
        address(z),
        address(beta),
        address(gate),
        code(q),
        beta.shape[1],
        o_norm.shape[0],
        q_conv.shape[-1],
        address(q_conv),
        address(k_conv),
        address(v_conv),
        address(a_log),
        address(dt_bias),
        address(o_norm),
        lower_bound,
        l2_eps,
        norm_eps,
        address(kept),
        address(kept_conv),
        code(q if kept_conv is None else kept_conv),
        (address(cu_seqlens), address(state_slots), cu_seqlens.numel() - 1),
        address(o),
    )
    if state is not None and kept is not state:
        state.copy_(kept)
    if conv_state is not None and kept_conv is not conv_state:
        conv_state.copy_(kept_conv)
    return o


def supports_mix(key: OpKey) -> str | None:
    """float32 or bfloat16 activations, float32 weights and state, width a multiple of 16, up to 8 taps."""
    _, width, taps = key.sizes
    if taps > MAX_TAPS:
        return f"takes up to {MAX_TAPS} taps, not {taps}"
    own = key.dtypes[:1]
    states = [_FLOAT32, ACTIVATIONS] if len(key.dtypes) > 12 else []
    types: list[tuple[Any, ...]] = [ACTIVATIONS, *[own] * 5, *[_FLOAT32] * 6, *states]
    return refusal(key, multiples=(width,)) or refuse_types(key, *types)
