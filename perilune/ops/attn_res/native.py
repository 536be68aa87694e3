"""The attention-residual mix by the native core."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, address, code, core, refusal, refuse_types
from perilune.ops.registry import OpKey


def attn_res_mix(candidates: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See the package's contract."""
    rows = [candidate.contiguous() for candidate in candidates]
    x = torch.empty_like(rows[0])
    core().attn_res_mix(
        [row.data_ptr() for row in rows],
        code(x),
        *x.shape,
        address(query),
        address(norm_weight),
        code(norm_weight),
        eps,
        address(x),
    )
    return x


def supports(key: OpKey) -> str | None:
    """Any row length; float32 or bfloat16, norm weight of the candidates' dtype."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, (torch.float32,), (key.dtypes[0],))
