"""mxfp4_linear(x, packed, scale) -> y: x [..., I] times an MXFP4 weight [O, I] in the released packing, y [..., O].

packed u8 [O, I/2]: byte b holds columns 2b (low nibble) and 2b+1; codes are E2M1. scale u8 [O, I/32]: E8M0, value
2^(s-127), one per 32 consecutive columns; 255 is not a number and never stored. Weights are exact in bfloat16, so the
product is a dense linear in x's dtype.
"""

from perilune.ops._native import register
from perilune.ops.mxfp4 import native, reference
from perilune.ops.registry import Op, tensor_key

mxfp4_linear = Op(
    "mxfp4_linear",
    reference.mxfp4_linear,
    key=lambda x, packed, scale: tensor_key(x, packed, scale, sizes=packed.shape),
)

register(mxfp4_linear, native.mxfp4_linear, native.supports_mxfp4_linear)
