"""Kimi Delta Attention.

kda_decay(z, a_log, dt_bias, lower_bound) -> g: z [T, H, D] decay logits, a_log [H] f32, dt_bias [H, D] f32;
    g = lower_bound * sigmoid(exp(a_log) * (z + dt_bias)), float32 log decay in (lower_bound, 0).

kda_recurrent(q, k, v, g, beta, l2_eps, state, state_slots, cu_seqlens) -> o, token by token.
kda_chunk(same) -> o, in chunks, for many tokens a sequence.
    q, k, v [T, H, D] after the convolution; here they are L2-normalised (eps inside the root), q scaled by D^-0.5.
    g [T, H, D] f32; beta [T, H] f32. Sequences lie end to end as cu_seqlens [N+1] says.
    state [slots, H, D(key), D(value)] f32 or None: row state_slots[n] [N] is the state of sequence n, read and replaced
    in place. None means a zero state, and nothing is kept. o [T, H, D] in q's dtype.
"""

from torch import Tensor

from perilune.ops.kda import reference
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


kda_decay = Op(
    "kda_decay",
    reference.kda_decay,
    key=lambda z, a_log, dt_bias, lower_bound: tensor_key(z, a_log, dt_bias, sizes=z.shape[1:]),
)
kda_recurrent = Op("kda_recurrent", reference.kda_recurrent, key=_attention_key)
kda_chunk = Op("kda_chunk", reference.kda_chunk, key=_attention_key)
