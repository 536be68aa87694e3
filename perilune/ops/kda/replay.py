"""KDA over tokens that may be taken back, in plain torch: a pass that records, and the commit of its first tokens.

Shapes: L layers, R recorded rows, N sequences, H heads, D head width, P = H * D.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops import ragged
from perilune.ops.conv.reference import short_conv
from perilune.ops.kda.reference import _normalised, _scan, kda_decay
from perilune.ops.norm.reference import gated_rms_norm


class KdaRecords(NamedTuple):
    """What a verifying pass leaves of each token; the first dim is layers where a commit takes it, else absent."""

    inputs: Tensor  # [L, R, 3 P] in the activations' dtype: q, k, v before the convolution
    keys: Tensor  # [L, R, H, D] in the same dtype, normalised
    decays: Tensor  # [L, R, H, D] float32
    corrections: Tensor  # [L, R, H, D] float32: beta (v - S^T k)


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
    """See the package's contract."""
    heads, width, num_tokens = beta.shape[1], o_norm.shape[0], q.shape[0]
    own_slots = torch.arange(state_slots.shape[0])
    streams = zip((q, k, v), (q_conv, k_conv, v_conv), conv_state[state_slots].chunk(3, dim=-1), strict=True)
    convolved = (short_conv(x, weight.squeeze(1), own.clone(), own_slots, cu_seqlens) for x, weight, own in streams)
    q_THD, k_THD, v_THD, z_THD, gate_THD = (x.unflatten(-1, (heads, width)) for x in (*convolved, z, gate))
    g_THD = kda_decay(z_THD, a_log[:heads], dt_bias.view(heads, width), lower_bound)
    seq_lengths = ragged.lengths(cu_seqlens)
    beta_TH = torch.sigmoid(beta.float())
    o, corrections, _ = _scan(q_THD, k_THD, v_THD, g_THD, beta_TH, l2_eps, state, state_slots, seq_lengths)
    records.inputs[:num_tokens] = torch.cat((q, k, v), dim=-1)
    records.keys[:num_tokens] = _normalised(q_THD, k_THD, v_THD, l2_eps)[1].to(q.dtype)
    records.decays[:num_tokens] = g_THD.exp()
    records.corrections[:num_tokens] = ragged.unpad(corrections, seq_lengths)
    o_THD = ragged.unpad(o, seq_lengths).to(q.dtype)
    return gated_rms_norm(o_THD, o_norm, gate_THD, norm_eps).flatten(1)


def kda_commit(
    state: Tensor, conv_state: Tensor, records: KdaRecords, state_slots: Tensor, cu_seqlens: Tensor, counts: Tensor
) -> None:
    """See the package's contract."""
    sequences = zip(
        state_slots.tolist(), cu_seqlens.tolist(), ragged.lengths(cu_seqlens), counts.tolist(), strict=False
    )
    for slot, first, length, count in sequences:
        if not 0 <= count <= length:
            raise IndexError("kda_commit: more tokens than the pass had")
        s_LHDD = state[:, slot]
        for t in range(first, first + count):
            change = records.keys[:, t].float()[..., None] * records.corrections[:, t, :, None, :]
            s_LHDD = records.decays[:, t, ..., None] * s_LHDD + change
        state[:, slot] = s_LHDD
        taps = conv_state.shape[2]
        inputs = records.inputs[:, first : first + count]
        window = torch.cat((conv_state[:, slot].to(inputs.dtype), inputs), dim=1)
        if count:
            conv_state[:, slot] = window[:, window.shape[1] - taps :].to(conv_state.dtype)
