"""Router, activation and expert pass in plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.linear.reference import round_to_int8
from perilune.ops.moe.expert_table import DenseExpert, ExpertTable, PackedExpert
from perilune.ops.moe.streamed import StreamedTable
from perilune.ops.mxfp4.reference import mxfp4_linear

# Keeps the renormalisation finite when every chosen score underflows; the released code's value.
_WEIGHT_FLOOR = 1e-20


def moe_route(
    x: Tensor, weight: Tensor, bias: Tensor, num_chosen: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Sigmoid scores; the bias serves the choice, the plain scores become the weights."""
    # A float32 sigmoid rounds by an entry's place in a vector register, which would break ties between equal logits.
    scores = torch.sigmoid(F.linear(x.float(), weight.float()).double()).float()
    # A stable sort gives ties to the lower id; topk promises no order.
    order = (scores + bias).sort(dim=-1, descending=True, stable=True)
    expert_ids = order.indices[:, :num_chosen]
    weights = scores.gather(1, expert_ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _WEIGHT_FLOOR)
    return expert_ids, weights * scaling


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), float32 inside."""
    g, u = gate.float(), up.float()
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: ExpertTable[DenseExpert],
    beta: float,
    linear_beta: float,
) -> Tensor:
    """Weighted sum of the chosen experts, one expert after the other over all its tokens."""

    def run(expert: int, rows: Tensor) -> Tensor:
        w1, w3, w2 = experts[expert]
        return F.linear(situ(F.linear(rows, w1), F.linear(rows, w3), beta, linear_beta), w2)

    return _dispatch(x, expert_ids, expert_weights, len(experts), run)


def moe_experts_mxfp4(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: ExpertTable[PackedExpert] | StreamedTable,
    beta: float,
    linear_beta: float,
    int8_activations: bool = False,
) -> Tensor:
    """The same from packed weights; an expert is decoded once for all its tokens."""
    linear = _int8_linear if int8_activations else mxfp4_linear

    def run(expert: int, rows: Tensor) -> Tensor:
        packed = experts[expert]
        gate = linear(rows, packed.w1_packed, packed.w1_scale)
        up = linear(rows, packed.w3_packed, packed.w3_scale)
        return linear(situ(gate, up, beta, linear_beta), packed.w2_packed, packed.w2_scale)

    return _dispatch(x, expert_ids, expert_weights, experts.shape[0], run)


def _int8_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """mxfp4_linear of x rounded to int8, in float32, since bfloat16 would round the steps again."""
    return mxfp4_linear(round_to_int8(x.float()), packed, scale).to(x.dtype)


def _dispatch(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    num_experts: int,
    run: Callable[[int, Tensor], Tensor],
) -> Tensor:
    num_chosen = expert_ids.shape[1]
    flat_ids = expert_ids.flatten()
    order = flat_ids.argsort(stable=True)
    tokens = order // num_chosen
    counts = torch.bincount(flat_ids, minlength=num_experts).tolist()
    pieces = [run(expert, rows) for expert, rows in enumerate(x[tokens].split(counts)) if rows.shape[0]]
    # Back to [T, K, D] in the order of choice, so that a token's sum does not depend on its neighbours.
    chosen = torch.cat(pieces)[order.argsort()].unflatten(0, (-1, num_chosen))
    return torch.einsum("tk,tkd->td", expert_weights, chosen.float()).to(x.dtype)
