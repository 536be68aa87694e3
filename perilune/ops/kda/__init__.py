"""Kimi Delta Attention.

kda_decay(z, a_log, dt_bias, lower_bound) -> g: z [T, H, D] decay logits, a_log [H] f32, dt_bias [H, D] f32;
    g = lower_bound * sigmoid(exp(a_log) * (z + dt_bias)), float32 log decay in (lower_bound, 0).

kda_recurrent(q, k, v, g, beta, l2_eps, state, state_slots, cu_seqlens) -> o, token by token.
kda_chunk(same) -> o, in chunks, for many tokens a sequence.
    q, k, v [T, H, D] after the convolution; here they are L2-normalised (eps inside the root), q scaled by D^-0.5.
    g [T, H, D] f32; beta [T, H] f32. Sequences lie end to end as cu_seqlens [N+1] says.
    state [slots, H, D(key), D(value)] f32 or None: row state_slots[n] [N] is the state of sequence n, read and replaced
    in place. None means a zero state, and nothing is kept. o [T, H, D] in q's dtype.

kda_mix(q, k, v, z, beta, gate, q_conv, k_conv, v_conv, a_log, dt_bias, o_norm, lower_bound, l2_eps, norm_eps,
        state, conv_state, state_slots, cu_seqlens) -> o: a KDA layer between its projections. P = H * D.
    q, k, v, z (decay logits), gate [T, P] and beta (logits) [T, H] in one dtype. q_conv, k_conv, v_conv [P, 1, K] f32;
    a_log f32, of which the first H entries are read; dt_bias [P] f32; o_norm [D] f32.
    short_conv of q, k, v; kda_decay of z; sigmoid of beta in float32; the delta rule: kda_recurrent for sequences with
    one token, kda_chunk for longer ones; gated_rms_norm with gate. Every result is rounded where these ops round it.
    state as above and conv_state [slots, K-1, 3 P], q | k | v, are read and replaced in place; both or none are given.
    o [T, P] in q's dtype.

kda_verify(the arguments of kda_mix, records) -> o, for tokens that may be taken back: every sequence takes the
    recurrence, `state` and `conv_state` are given and stay as they are. `records` is a KdaRecords of one layer, whose
    first T rows are written: inputs [R, 3 P], q | k | v as given, and keys [R, H, D] in q's dtype; decays and
    corrections [R, H, D] f32.
kda_commit(state, conv_state, records, state_slots, cu_seqlens, counts): all layers at once take the first counts[n] [N]
    int64 tokens of each sequence of a verifying pass. state [L, slots, H, D, D] f32 and conv_state [L, slots, K-1, 3 P]
    change in place; records as above with layers in front. The states are then those of as many plain steps of one
    token: by the native core to the bit, if it did all of it. IndexError for a count beyond the sequence's tokens.
"""

from typing import Any

from torch import Tensor

from perilune.ops._native import register
from perilune.ops.kda import native, reference, replay
from perilune.ops.kda.replay import KdaRecords
from perilune.ops.registry import Op, OpKey, tensor_key


def _attention_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    l2_eps: float,
    state: Tensor | None,
    state_slots: Tensor,
    cu_seqlens: Tensor,
) -> OpKey:
    return tensor_key(q, k, v, g, beta, state, sizes=q.shape[1:])


def _mix_key(
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
) -> OpKey:
    activations, weights = (q, k, v, z, beta, gate), (q_conv, k_conv, v_conv, a_log, dt_bias, o_norm)
    sizes = (beta.shape[1], o_norm.shape[0], q_conv.shape[-1])
    return tensor_key(*activations, *weights, state, conv_state, sizes=sizes)


kda_decay = Op(
    "kda_decay",
    reference.kda_decay,
    key=lambda z, a_log, dt_bias, lower_bound: tensor_key(z, a_log, dt_bias, sizes=z.shape[1:]),
)
kda_recurrent = Op("kda_recurrent", reference.kda_recurrent, key=_attention_key)
kda_chunk = Op("kda_chunk", reference.kda_chunk, key=_attention_key)
kda_mix = Op("kda_mix", reference.kda_mix, key=_mix_key)


def _verify_key(*given: Any) -> OpKey:
    records: KdaRecords = given[-1]
    device, dtypes, sizes, needs_grad = _mix_key(*given[:-1])
    return OpKey(device, (*dtypes, *(record.dtype for record in records)), sizes, needs_grad)


def _commit_key(
    state: Tensor, conv_state: Tensor, records: KdaRecords, state_slots: Tensor, cu_seqlens: Tensor, counts: Tensor
) -> OpKey:
    is_whole = all(x.is_contiguous() for x in (state, conv_state, *records))
    sizes = (state.shape[-1], conv_state.shape[2], is_whole)
    return tensor_key(state, conv_state, *records, state_slots, cu_seqlens, counts, sizes=sizes)


kda_verify = Op("kda_verify", replay.kda_verify, key=_verify_key)
kda_commit = Op("kda_commit", replay.kda_commit, key=_commit_key)

register(kda_decay, native.kda_decay, native.supports_decay)
register(kda_recurrent, native.kda_recurrent, native.supports_attention)
register(kda_chunk, native.kda_chunk, native.supports_attention)
register(kda_mix, native.kda_mix, native.supports_mix)
register(kda_verify, native.kda_verify, native.supports_verify)
register(kda_commit, native.kda_commit, native.supports_commit)

__all__ = [
    "KdaRecords",
    "kda_chunk",
    "kda_commit",
    "kda_decay",
    "kda_mix",
    "kda_recurrent",
    "kda_verify",
]
