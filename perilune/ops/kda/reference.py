"""KDA in plain torch: the recurrence of the Kimi Linear paper, the same in chunks, and all of a layer between
its projections.

Shapes: N sequences, L padded length, H heads, C chunk rows, D head width, P = H * D; S is the state, key by value.
"""

from collections.abc import Callable, Iterator
from itertools import groupby

import torch
from torch import Tensor

from perilune.ops import ragged
from perilune.ops.conv.reference import short_conv
from perilune.ops.norm.reference import gated_rms_norm

# Rows of a chunk. Decays are formed relative to a row in the middle: with log decays above -5 a distance of 8 rows
# stays within exp(40), so both factors of exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j) are safe in float32.
CHUNK_ROWS = 16
_REFERENCE_ROW = 7


def kda_decay(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """g = lower_bound * sigmoid(exp(a_log) (z + dt_bias)); z [T, H, D] -> float32 [T, H, D]."""
    return lower_bound * torch.sigmoid(a_log.exp()[:, None] * (z.float() + dt_bias))


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
    """S <- diag(exp g) S; S <- S + beta k (v - S^T k)^T; o = S^T q, one token after the other."""
    seq_lengths = ragged.lengths(cu_seqlens)
    o_NLHD, _, s_NHDD = _scan(q, k, v, g, beta, l2_eps, state, state_slots, seq_lengths)
    _store_state(state, state_slots, s_NHDD)
    return ragged.unpad(o_NLHD, seq_lengths).to(q.dtype)


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    l2_eps: float,
    state: Tensor | None,
    state_slots: Tensor,
    seq_lengths: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token: o and corrections [N, L, H, D] float32, and the final states; writes nothing."""
    q_NLHD, k_NLHD, v_NLHD = (ragged.pad(x, seq_lengths) for x in _normalised(q, k, v, l2_eps))
    g_NLHD, beta_NLH = ragged.pad(g, seq_lengths), ragged.pad(beta, seq_lengths)
    s_NHDD = _initial_state(state, state_slots, q_NLHD)
    outputs, corrections = [], []
    for t in range(q_NLHD.shape[1]):
        k_t = k_NLHD[:, t]
        s_NHDD = g_NLHD[:, t].exp()[..., None] * s_NHDD
        correction = beta_NLH[:, t, :, None] * (v_NLHD[:, t] - torch.einsum("nhkv,nhk->nhv", s_NHDD, k_t))
        s_NHDD = s_NHDD + k_t[..., None] * correction[..., None, :]
        outputs.append(torch.einsum("nhkv,nhk->nhv", s_NHDD, q_NLHD[:, t]))
        corrections.append(correction)
    return torch.stack(outputs, dim=1), torch.stack(corrections, dim=1), s_NHDD


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
    """The recurrence over chunks of rows: a triangular solve inside each, a state hand-over between them.

    Padding rows have beta = 0 and g = 0 and so leave the state as it is.
    """
    seq_lengths = ragged.lengths(cu_seqlens)
    q_NLHD, k_NLHD, v_NLHD, g_NLHD, beta_NLH = (ragged.pad(x, seq_lengths, CHUNK_ROWS) for x in (q, k, v, g, beta))
    s_NHDD = _initial_state(state, state_slots, q_NLHD)
    o_NLHD, s_NHDD = chunk_scan(q_NLHD, k_NLHD, v_NLHD, g_NLHD, beta_NLH, l2_eps, s_NHDD)
    _store_state(state, state_slots, s_NHDD)
    return ragged.unpad(o_NLHD[:, : max(seq_lengths)], seq_lengths).to(q.dtype)


def chunk_scan(
    q_NLHD: Tensor, k_NLHD: Tensor, v_NLHD: Tensor, g_NLHD: Tensor, beta_NLH: Tensor, l2_eps: float, s_NHDD: Tensor
) -> tuple[Tensor, Tensor]:
    """All chunks of equally long sequences, L a multiple of the chunk: (o [N, L, H, D] float32, final state)."""
    q_NHMCD, k_NHMCD, v_NHMCD = (_chunks(x) for x in _normalised(q_NLHD, k_NLHD, v_NLHD, l2_eps))
    beta_NHMC1 = _chunks(beta_NLH[..., None])
    total = _chunks(g_NLHD).cumsum(-2)  # G: log decay from the chunk's start to each row
    from_middle = total - total[..., _REFERENCE_ROW : _REFERENCE_ROW + 1, :]
    k_late, k_early = k_NHMCD * from_middle.exp(), k_NHMCD * (-from_middle).exp()
    kk = (beta_NHMC1 * (k_late @ k_early.transpose(-1, -2))).tril(-1)
    qk = ((q_NHMCD * from_middle.exp()) @ k_early.transpose(-1, -2)).tril()
    decay_in, decay_out = total.exp(), (total[..., -1:, :] - total).exp()
    rhs = beta_NHMC1 * torch.cat((decay_in * k_NHMCD, v_NHMCD), dim=-1)
    solved = torch.linalg.solve_triangular(kk, rhs, upper=False, unitriangular=True)
    w_NHMCD, u_NHMCD = solved.split(k_NHMCD.shape[-1], dim=-1)
    q_in, k_out, decay_all = decay_in * q_NHMCD, decay_out * k_NHMCD, total[..., -1, :].exp()
    outputs = []
    for m in range(q_NHMCD.shape[2]):
        corrected = u_NHMCD[:, :, m] - w_NHMCD[:, :, m] @ s_NHDD
        outputs.append(q_in[:, :, m] @ s_NHDD + qk[:, :, m] @ corrected)
        s_NHDD = decay_all[:, :, m, :, None] * s_NHDD + k_out[:, :, m].transpose(-1, -2) @ corrected
    return torch.cat(outputs, dim=2).transpose(1, 2), s_NHDD


def _normalised(q: Tensor, k: Tensor, v: Tensor, l2_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    def l2(x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + l2_eps)).to(x.dtype)

    return l2(q).float() * q.shape[-1] ** -0.5, l2(k).float(), v.float()


def _chunks(x_NLHD: Tensor) -> Tensor:
    # Made contiguous, or every matrix product of a chunk would gather its rows anew.
    return x_NLHD.unflatten(1, (-1, CHUNK_ROWS)).permute(0, 3, 1, 2, 4).contiguous()


def _initial_state(state: Tensor | None, state_slots: Tensor, x_NLHD: Tensor) -> Tensor:
    if state is not None:
        return state[state_slots]
    num_sequences, _, heads, width = x_NLHD.shape
    return torch.zeros(num_sequences, heads, width, width, device=x_NLHD.device)


def _store_state(state: Tensor | None, state_slots: Tensor, s_NHDD: Tensor) -> None:
    if state is not None:
        state[state_slots] = s_NHDD.to(state.dtype)


def mix_of(
    conv: Callable[..., Tensor],
    decay: Callable[..., Tensor],
    recurrent: Callable[..., Tensor],
    chunk: Callable[..., Tensor],
    gated_norm: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """kda_mix as the composition of the ops' implementations given."""

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
        heads, width = beta.shape[1], o_norm.shape[0]
        conv_states = (None,) * 3 if conv_state is None else conv_state.chunk(3, dim=-1)
        streams = zip((q, k, v), (q_conv, k_conv, v_conv), conv_states, strict=True)
        convolved = (conv(x, weight.squeeze(1), own, state_slots, cu_seqlens) for x, weight, own in streams)
        q_THD, k_THD, v_THD, z_THD, gate_THD = (x.unflatten(-1, (heads, width)) for x in (*convolved, z, gate))
        g_THD = decay(z_THD, a_log[:heads], dt_bias.view(heads, width), lower_bound)
        beta_TH = torch.sigmoid(beta.float())
        pieces = []
        for is_single, tokens, sequences, bounds in _runs(cu_seqlens):
            own = (x[tokens] for x in (q_THD, k_THD, v_THD, g_THD, beta_TH))
            attend = recurrent if is_single else chunk
            pieces.append(attend(*own, l2_eps, state, state_slots[sequences], bounds))
        o_THD = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return gated_norm(o_THD, o_norm, gate_THD, norm_eps).flatten(1)

    return kda_mix


kda_mix = mix_of(short_conv, kda_decay, kda_recurrent, kda_chunk, gated_rms_norm)


def _runs(cu_seqlens: Tensor) -> Iterator[tuple[bool, slice, slice, Tensor]]:
    """Neighbouring sequences with one token each, or with more: which, tokens, sequences, own cu_seqlens from 0."""
    first = 0
    for is_single, run in groupby(ragged.lengths(cu_seqlens), key=lambda length: length == 1):
        last = first + len(list(run))
        start, end = int(cu_seqlens[first]), int(cu_seqlens[last])
        yield is_single, slice(start, end), slice(first, last), cu_seqlens[first : last + 1] - start
        first = last
