"""Router, activation and expert pass by the native core."""

import torch
from torch import Tensor

from perilune.ops._native import ACTIVATIONS, MXFP4_CODE, address, code, core, refusal, refuse_types
from perilune.ops.moe.expert_table import DenseExpert, E, ExpertTable, PackedExpert
from perilune.ops.moe.streamed import StreamedTable
from perilune.ops.mxfp4.reference import GROUP_SIZE
from perilune.ops.registry import OpKey

# Enough that a prompt of thousands of tokens meets each expert in few pieces.
SCRATCH_BYTES = 256 << 20


def moe_route(
    x: Tensor, weight: Tensor, bias: Tensor, num_chosen: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """See the package's contract."""
    x, weight = x.contiguous(), weight.contiguous()
    ids = torch.empty(x.shape[0], num_chosen, dtype=torch.int64)
    weights = torch.empty(x.shape[0], num_chosen, dtype=torch.float32)
    matrix = (address(weight), 0, *weight.shape, code(weight))
    sizes = (num_chosen, renormalize, scaling)
    core().moe_route(
        address(x), code(x), x.shape[0], matrix, address(bias.contiguous()), *sizes, address(ids), address(weights)
    )
    return ids, weights


def supports_moe_route(key: OpKey) -> str | None:
    """Any number of experts and choices."""
    return refusal(key, multiples=key.sizes[1:2]) or refuse_types(key, ACTIVATIONS, ACTIVATIONS, (torch.float32,))


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See the package's contract."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    core().situ(address(gate), address(up), code(gate), gate.numel(), beta, linear_beta, address(y))
    return y


def supports_situ(key: OpKey) -> str | None:
    """Any sizes."""
    return refusal(key) or refuse_types(key, ACTIVATIONS, (key.dtypes[0],))


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: ExpertTable[DenseExpert],
    beta: float,
    linear_beta: float,
) -> Tensor:
    """See the package's contract."""
    return _experts(x, expert_ids, expert_weights, experts, code(x), beta, linear_beta, False)


def supports_moe_experts(key: OpKey) -> str | None:
    """Sizes in multiples of 16."""
    weights = (key.dtypes[0],)
    return refusal(key, multiples=key.sizes[1:]) or _refuse_experts_types(key, weights)


def moe_experts_mxfp4(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: ExpertTable[PackedExpert] | StreamedTable,
    beta: float,
    linear_beta: float,
    int8_activations: bool = False,
) -> Tensor:
    """See the package's contract."""
    return _experts(x, expert_ids, expert_weights, experts, MXFP4_CODE, beta, linear_beta, int8_activations)


def supports_moe_experts_mxfp4(key: OpKey) -> str | None:
    """Sizes in multiples of 32, as the packing has them anyway."""
    odd = [size for size in key.sizes[1:] if size % GROUP_SIZE]
    groups = f"sizes must be multiples of {GROUP_SIZE}, not {odd}" if odd else None
    return refusal(key) or groups or _refuse_experts_types(key, (torch.uint8,))


def _refuse_experts_types(key: OpKey, weights: tuple[torch.dtype, ...]) -> str | None:
    return refuse_types(key, ACTIVATIONS, (torch.int64,), (torch.float32,), weights)


def _experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: ExpertTable[E] | StreamedTable,
    weight_code: int,
    beta: float,
    linear_beta: float,
    int8_activations: bool,
) -> Tensor:
    x, ids, weights = x.contiguous(), expert_ids.contiguous(), expert_weights.contiguous()
    y = torch.empty_like(x)
    num_experts, inner, latent = experts.shape
    chosen = (address(ids), address(weights), ids.shape[1])
    sizes = (num_experts, latent, inner, weight_code, beta, linear_beta)
    rest = (address(y), int8_activations, SCRATCH_BYTES)
    given = (address(x), code(x), x.shape[0], *chosen)
    if isinstance(experts, StreamedTable):
        core().moe_experts_streamed(*given, experts.stream.cache, experts.layer, *sizes, *rest)
    else:
        core().moe_experts(*given, address(experts.addresses), *sizes, *rest)
    return y
