"""Norms. All compute in float32 and return the dtype of their input.

rms_norm(x, weight, eps): x [..., D], weight [D]; the normed value is rounded before the weight is applied.
gated_rms_norm(x, weight, gate, eps): x [..., D], weight [D] f32, gate [..., D]; rms(x) * weight * sigmoid(gate),
    rounded once before and once after the gate's product is formed in float32.
layer_norm(x, weight, bias, eps): mean-subtracting, biased variance; result stays float32.
"""

from perilune.ops.norm import reference
from perilune.ops.registry import Op, tensor_key

rms_norm = Op("rms_norm", reference.rms_norm, key=lambda x, weight, eps: tensor_key(x, weight, sizes=weight.shape))
gated_rms_norm = Op(
    "gated_rms_norm",
    reference.gated_rms_norm,
    key=lambda x, weight, gate, eps: tensor_key(x, weight, gate, sizes=weight.shape),
)
layer_norm = Op(
    "layer_norm", reference.layer_norm, key=lambda x, weight, bias, eps: tensor_key(x, weight, sizes=weight.shape)
)
