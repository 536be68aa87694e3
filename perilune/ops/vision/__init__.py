"""What the vision tower computes besides linear maps and norms.

patch_attention(qkv, cos, sin, cu_seqlens, queries) -> o: softmax attention in which each of the patches in the slice
    `queries` sees all patches of its own picture. qkv [L, 3, H, D] float32 or bfloat16; cos, sin [L, D / 2] float32;
    cu_seqlens [N + 1] int64, the first patch of each picture; o [Q, H, D] in qkv's dtype. Channels 2j and 2j + 1 of q
    and k are turned by the patch's j-th angle in float32 and rounded to qkv's dtype; scores are scaled by D^-1/2. No
    matrix of all by all patches is built.
gelu_tanh(x) -> y: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), computed in float32; any shape, y in x's dtype.
"""

from perilune.ops._native import register
from perilune.ops.registry import Op, tensor_key
from perilune.ops.vision import native, reference

patch_attention = Op(
    "patch_attention",
    reference.patch_attention,
    key=lambda qkv, cos, sin, cu_seqlens, queries: tensor_key(qkv, cos, sin, sizes=qkv.shape[2:]),
)
gelu_tanh = Op("gelu_tanh", reference.gelu_tanh, key=lambda x: tensor_key(x))

register(patch_attention, native.patch_attention, native.supports_patch_attention)
register(gelu_tanh, native.gelu_tanh, native.supports_gelu_tanh)
