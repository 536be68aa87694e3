"""Norms, computed in float32.

rms_norm(x, weight, eps): x [..., D], weight [W]; the normed value is rounded to x's dtype before the weight is applied.
    The first W columns are normed, those after them passed on unchanged.
gated_rms_norm(x, weight, gate, eps): x [..., D], weight [D] f32, gate [..., D]; rms(x) * weight * sigmoid(gate),
    rounded to x's dtype once, at the end.
layer_norm(x, weight, bias, eps): mean-subtracting, biased variance; rounded to x's dtype once, at the end.
"""

from perilune.ops._native import register
from perilune.ops.norm import native, reference
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

register(rms_norm, native.rms_norm, native.supports_rms_norm)
register(gated_rms_norm, native.gated_rms_norm, native.supports_gated_rms_norm)
register(layer_norm, native.layer_norm, native.supports_layer_norm)
