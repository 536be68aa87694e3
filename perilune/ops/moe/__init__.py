"""Mixture of experts.

moe_route(x, weight, bias, num_chosen, renormalize, scaling) -> (expert_ids, expert_weights),
    [T, K] int64 and [T, K] f32. x [T, D]; weight [E, D]; bias [E] f32 serves the choice only.
    Sigmoid scores, wholly in float32; ties to the lower id.

situ(gate, up, beta, linear_beta) -> beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), in
    float32, rounded to gate's dtype; gate, up [..., I].

moe_experts(x, expert_ids, expert_weights, w1, w3, w2, beta, linear_beta) -> y: weighted sum of the chosen experts.
    x [T, D]; expert_ids, expert_weights [T, K]; w1, w3: E tensors [I, D], w2: E tensors [D, I], or one stacked tensor
    each. Expert outputs are rounded to x's dtype, their sum is float32; y [T, D] in x's dtype.
moe_experts_mxfp4(x, expert_ids, expert_weights, experts, beta, linear_beta) -> y: the same from packed weights;
    experts: E `PackedExpert`s, as `ops.mxfp4` describes the packing.
"""

from collections.abc import Sequence

from torch import Tensor

from perilune.ops.moe import reference
from perilune.ops.moe.reference import PackedExpert
from perilune.ops.registry import Op, OpKey, tensor_key

moe_route = Op(
    "moe_route",
    reference.moe_route,
    key=lambda x, weight, bias, num_chosen, renormalize, scaling: tensor_key(
        x, weight, bias, sizes=(*weight.shape, num_chosen)
    ),
)
situ = Op("situ", reference.situ, key=lambda gate, up, beta, linear_beta: tensor_key(gate, up))


def _dense_key(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w1: Sequence[Tensor] | Tensor,
    w3: Sequence[Tensor] | Tensor,
    w2: Sequence[Tensor] | Tensor,
    beta: float,
    linear_beta: float,
) -> OpKey:
    return tensor_key(x, w1[0], sizes=(len(w1), *w1[0].shape))


def _packed_key(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: Sequence[PackedExpert],
    beta: float,
    linear_beta: float,
) -> OpKey:
    return tensor_key(x, experts[0].w1_packed, sizes=(len(experts), *experts[0].w1_packed.shape))


moe_experts = Op("moe_experts", reference.moe_experts, key=_dense_key)
moe_experts_mxfp4 = Op("moe_experts_mxfp4", reference.moe_experts_mxfp4, key=_packed_key)

__all__ = ["PackedExpert", "moe_experts", "moe_experts_mxfp4", "moe_route", "situ"]
