"""KDA by the native core."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.conv.native import MAX_TAPS
from perilune.ops.kda.replay import KdaRecords
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
    activations, weights = (q, k, v, z, beta, gate), (q_conv, k_conv, v_conv, a_log, dt_bias, o_norm)
    kept = None if state is None else state.contiguous()
    kept_conv = None if conv_state is None else conv_state.contiguous()
    numbers = (lower_bound, l2_eps, norm_eps)
    o = _mix(activations, weights, numbers, kept, kept_conv, state_slots, cu_seqlens, _NO_RECORDS)
    if state is not None and kept is not state:
        state.copy_(kept)
    if conv_state is not None and kept_conv is not conv_state:
        conv_state.copy_(kept_conv)
    return o


def kda_verify(
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
    state: Tensor,
    conv_state: Tensor,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    records: KdaRecords,
) -> Tensor:
    """See the package's contract; records are contiguous."""
    assert all(record.is_contiguous() for record in records)
    assert records.inputs.shape[0] >= q.shape[0], "fewer rows of records than tokens"
    activations, weights = (q, k, v, z, beta, gate), (q_conv, k_conv, v_conv, a_log, dt_bias, o_norm)
    states, numbers = (state.contiguous(), conv_state.contiguous()), (lower_bound, l2_eps, norm_eps)
    return _mix(activations, weights, numbers, *states, state_slots, cu_seqlens, _addresses(records))


_NO_RECORDS = (0, 0, 0, 0)


def _addresses(records: KdaRecords) -> tuple[int, int, int, int]:
    return address(records.inputs), address(records.keys), address(records.decays), address(records.corrections)


def _mix(
    activations: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    numbers: tuple[float, float, float],
    state: Tensor | None,
    conv_state: Tensor | None,
    state_slots: Tensor,
    cu_seqlens: Tensor,
    records: tuple[int, int, int, int],
) -> Tensor:
    activations, weights = tuple(x.contiguous() for x in activations), tuple(x.contiguous() for x in weights)
    q, beta, q_conv, o_norm = activations[0], activations[4], weights[0], weights[5]
    o = torch.empty_like(q)
    core().kda_mix(
        *map(address, activations),
        code(q),
        beta.shape[1],
        o_norm.shape[0],
        q_conv.shape[-1],
        *map(address, weights),
        *numbers,
        address(state),
        address(conv_state),
        code(q if conv_state is None else conv_state),
        (address(cu_seqlens), address(state_slots), cu_seqlens.numel() - 1),
        address(o),
        records,
    )
    return o


def kda_commit(
    state: Tensor, conv_state: Tensor, records: KdaRecords, state_slots: Tensor, cu_seqlens: Tensor, counts: Tensor
) -> None:
    """See the package's contract."""
    layers, rows, heads, width = records.keys.shape
    core().kda_commit(
        code(records.inputs),
        layers,
        heads,
        width,
        conv_state.shape[2] + 1,
        rows,
        state.shape[1],
        _addresses(records),
        address(state),
        address(conv_state),
        code(conv_state),
        (address(cu_seqlens), address(state_slots), state_slots.shape[0]),
        address(counts),
    )


def supports_verify(key: OpKey) -> str | None:
    """As kda_mix; records in the activations' dtype and float32."""
    own = key.dtypes[:1]
    reason = supports_mix(key._replace(dtypes=key.dtypes[:-4]))
    return reason or refuse_types(key._replace(dtypes=key.dtypes[-4:]), own, own, _FLOAT32, _FLOAT32)


def supports_commit(key: OpKey) -> str | None:
    """float32 states, contiguous ones and records."""
    width, _, is_whole = key.sizes
    if not is_whole:
        return "states and records must be contiguous"
    own, ids = key.dtypes[2:3], (torch.int64,)
    types: list[tuple[Any, ...]] = [_FLOAT32, ACTIVATIONS, ACTIVATIONS, own, _FLOAT32, _FLOAT32, ids, ids, ids]
    return refusal(key, multiples=(width,)) or refuse_types(key, *types)


def supports_mix(key: OpKey) -> str | None:
    """float32 or bfloat16 activations, float32 weights and state, width a multiple of 16, up to 8 taps."""
    _, width, taps = key.sizes
    if taps > MAX_TAPS:
        return f"takes up to {MAX_TAPS} taps, not {taps}"
    own = key.dtypes[:1]
    states = [_FLOAT32, ACTIVATIONS] if len(key.dtypes) > 12 else []
    types: list[tuple[Any, ...]] = [ACTIVATIONS, *[own] * 5, *[_FLOAT32] * 6, *states]
    return refusal(key, multiples=(width,)) or refuse_types(key, *types)
