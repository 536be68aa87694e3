"""Mixture of experts.

moe_route(x, weight, bias, num_chosen, renormalize, scaling) -> (expert_ids, expert_weights),
    [T, K] int64 and [T, K] f32. x [T, D]; weight [E, D]; bias [E] f32 serves the choice only.
    Sigmoid scores, wholly in float32; ties to the lower id.

situ(gate, up, beta, linear_beta) -> beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), in
    float32, rounded to gate's dtype; gate, up [..., I].

moe_experts(x, expert_ids, expert_weights, experts, beta, linear_beta) -> y: weighted sum of the chosen experts.
    x [T, D]; expert_ids int64, expert_weights f32 [T, K]; experts: an `ExpertTable` of `DenseExpert`s in x's dtype.
    Expert outputs are rounded to x's dtype, their sum is float32; y [T, D] in x's dtype.
moe_experts_mxfp4(x, expert_ids, expert_weights, experts, beta, linear_beta, int8_activations=False) -> y: the same from
    an `ExpertTable` of `PackedExpert`s, as `ops.mxfp4` describes the packing, or from a `StreamedTable` of them. Of the
    latter, a token whose expert cannot be read gets NaN from the native core, which notes why, and CheckpointError from
    the reference. With `int8_activations` the input of every product, x and SiTU's result, is first rounded to int8 per
    32 columns: x * (127 / largest), halves to even, times largest / 127, where `largest` is the group's largest
    magnitude.
"""

from torch import Tensor

from perilune.ops._native import register
from perilune.ops.moe import native, reference
from perilune.ops.moe.expert_table import DenseExpert, E, ExpertTable, PackedExpert
from perilune.ops.moe.streamed import ExpertPlaces, ExpertStream, StreamedTable
from perilune.ops.registry import Op, OpKey, tensor_key

moe_route = Op(
    "moe_route",
    reference.moe_route,
    key=lambda x, weight, bias, num_chosen, renormalize, scaling: tensor_key(
        x, weight, bias, sizes=(*weight.shape, num_chosen)
    ),
)
situ = Op("situ", reference.situ, key=lambda gate, up, beta, linear_beta: tensor_key(gate, up))


def _experts_key(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: ExpertTable[E] | StreamedTable,
    beta: float,
    linear_beta: float,
    int8_activations: bool = False,
) -> OpKey:
    return tensor_key(x, expert_ids, expert_weights, experts.sample, sizes=experts.shape)


moe_experts = Op("moe_experts", reference.moe_experts, key=_experts_key)
moe_experts_mxfp4 = Op("moe_experts_mxfp4", reference.moe_experts_mxfp4, key=_experts_key)

register(moe_route, native.moe_route, native.supports_moe_route)
register(situ, native.situ, native.supports_situ)
register(moe_experts, native.moe_experts, native.supports_moe_experts)
register(moe_experts_mxfp4, native.moe_experts_mxfp4, native.supports_moe_experts_mxfp4)

__all__ = [
    "DenseExpert",
    "ExpertPlaces",
    "ExpertStream",
    "ExpertTable",
    "PackedExpert",
    "StreamedTable",
    "moe_experts",
    "moe_experts_mxfp4",
    "moe_route",
    "situ",
]
