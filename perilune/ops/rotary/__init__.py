"""Rotary positions: pairs of channels turned by an angle that grows with the position.

rotary_turns(frequencies, factor, seq_lens, cu_seqlens, num_tokens) -> turns [T, 2 P] float32: cosines of each pair,
    then sines. frequencies [P] float64, radians per position; factor multiplies both. Sequences lie end to end as
    cu_seqlens [N+1] says, num_tokens = T in all; seq_lens [N]: tokens of each sequence including this call's, so that
    token i of n has position seq_lens[n] - length[n] + i. Angles are float64: they reach hundreds of thousands of
    radians.
rotate(x, turns, is_interleaved) -> y: x [T, W] or [T, H, W], whose last 2 P columns are turned, those before passed on.
    Pair p is columns (2 p, 2 p + 1) with `is_interleaved`, else (p, p + P). Computed in float32, rounded to x's dtype.
"""

from perilune.ops._native import register
from perilune.ops.registry import Op, tensor_key
from perilune.ops.rotary import native, reference

rotary_turns = Op(
    "rotary_turns",
    reference.rotary_turns,
    key=lambda frequencies, factor, seq_lens, cu_seqlens, num_tokens: tensor_key(frequencies, seq_lens, cu_seqlens),
)
rotate = Op(
    "rotate",
    reference.rotate,
    key=lambda x, turns, is_interleaved: tensor_key(x, turns, sizes=(x.shape[-1], turns.shape[-1])),
)

register(rotary_turns, native.rotary_turns, native.supports_turns)
register(rotate, native.rotate, native.supports_rotate)
