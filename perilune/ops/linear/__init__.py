"""dense_linear(x, weight) -> y: x [..., I], weight [O, I] of one dtype; y [..., O] of that dtype,
accumulated in float32.
"""

from perilune.ops.linear import reference
from perilune.ops.registry import Op, tensor_key

dense_linear = Op(
    "dense_linear", reference.dense_linear, key=lambda x, weight: tensor_key(x, weight, sizes=weight.shape)
)
