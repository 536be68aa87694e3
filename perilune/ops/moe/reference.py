"""Router, activation and expert pass in plain torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.mxfp4.reference import mxfp4_linear

# Keeps the renormalisation finite when every chosen score underflows; the released code's value.
_WEIGHT_FLOOR = 1e-20


class PackedExpert(NamedTuple):
    """One expert's six tensors in the released packing."""

    w1_packed: Tensor
    w1_scale: Tensor
    w3_packed: Tensor
    w3_scale: Tensor
    w2_packed: Tensor
    w2_scale: Tensor


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
    w1: Sequence[Tensor] | Tensor,
    w3: Sequence[Tensor] | Tensor,
    w2: Sequence[Tensor] | Tensor,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """Weighted sum of the chosen experts, one expert after the other over all its tokens."""

    def run(expert: int, rows: Tensor) -> Tensor:
        inner = situ(F.linear(rows, w1[expert]), F.linear(rows, w3[expert]), beta, linear_beta)
        return F.linear(inner, w2[expert])

    return _dispatch(x, expert_ids, expert_weights, len(w1), run)


def moe_experts_mxfp4(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: Sequence[PackedExpert],
    beta: float,
    linear_beta: float,
) -> Tensor:
    """The same from packed weights; an expert is decoded once for all its tokens."""

    def run(expert: int, rows: Tensor) -> Tensor:
        packed = experts[expert]
        gate = mxfp4_linear(rows, packed.w1_packed, packed.w1_scale)
        up = mxfp4_linear(rows, packed.w3_packed, packed.w3_scale)
        return mxfp4_linear(situ(gate, up, beta, linear_beta), packed.w2_packed, packed.w2_scale)

    return _dispatch(x, expert_ids, expert_weights, len(experts), run)


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
