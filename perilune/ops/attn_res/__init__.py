"""Attention residuals, block form, with the norm that always follows.

attn_res_mix(candidates, query, norm_weight, eps) -> x.
    candidates: n tensors [T, D], bank entries in order, then the live prefix.
    query [D] f32: product of the mixing norm's weight and the projection row.
    norm_weight [D]: weight of the RMSNorm applied to the mix. eps: of both norms.
    x [T, D] in the candidates' dtype. A single candidate is its own mix.
"""

from collections.abc import Sequence

from torch import Tensor

from perilune.ops._native import register
from perilune.ops.attn_res import native, reference
from perilune.ops.registry import Op, OpKey, tensor_key


def _key(candidates: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> OpKey:
    return tensor_key(*candidates[-1:], query, norm_weight, sizes=query.shape)


attn_res_mix = Op("attn_res_mix", reference.attn_res_mix, key=_key)

register(attn_res_mix, native.attn_res_mix, native.supports)
