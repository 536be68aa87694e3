"""short_conv(x, weight, state, state_slots, cu_seqlens) -> y: causal depthwise convolution and SiLU.

x [T, C]: sequences end to end as cu_seqlens [N+1] says. weight [C, K] f32, tap K-1 hits the current token.
state [slots, K-1, C] or None: the last K-1 inputs of each sequence, oldest first; row state_slots[n] [N] is read as the
left context of sequence n and replaced in place. None means zero context, and nothing is kept.
y [T, C] in x's dtype; the sum and SiLU are float32.
"""

from perilune.ops._native import register
from perilune.ops.conv import native, reference
from perilune.ops.registry import Op, tensor_key

short_conv = Op(
    "short_conv",
    reference.short_conv,
    key=lambda x, weight, state, state_slots, cu_seqlens: tensor_key(x, weight, state, sizes=weight.shape),
)

register(short_conv, native.short_conv, native.supports_short_conv)
