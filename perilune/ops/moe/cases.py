"""Cases of the mixture of experts: routing, activation, expert pass."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from perilune.ops.case import BFLOAT16, Case, CaseTable, Tolerance
from perilune.ops.moe.expert_table import DenseExpert, ExpertTable, PackedExpert
from perilune.ops.mxfp4.cases import packed_weight
from perilune.ops.mxfp4.reference import mxfp4_dequantize

_BETA, _LINEAR_BETA = 4.0, 25.0


@dataclass(frozen=True, kw_only=True)
class RouteCase(Case):
    """`num_chosen` of `num_experts` for x [rows, hidden]; `num_distinct` router rows, fewer than experts mean ties."""

    rows: int
    hidden: int
    num_experts: int
    num_chosen: int
    num_distinct: int
    renormalize: bool = True
    scaling: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SituCase(Case):
    """gate and up [*shape] of `magnitude`; large ones saturate both tanh and sigmoid."""

    shape: tuple[int, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertsCase(Case):
    """Experts of inner width `inner` over x [rows, latent].

    load: "spread" chooses at random, "one" gives every token the same experts, "few" leaves most experts idle.
    """

    rows: int
    latent: int = 64
    inner: int = 96
    num_experts: int = 6
    num_chosen: int = 2
    load: Literal["spread", "one", "few"] = "spread"
    int8_activations: bool = False


_ROUTE_FLOAT32 = (
    RouteCase(name="one token", rows=1, hidden=64, num_experts=16, num_chosen=4, num_distinct=16),
    RouteCase(name="ties", rows=23, hidden=48, num_experts=24, num_chosen=5, num_distinct=3),
    RouteCase(name="every expert ties", rows=3, hidden=32, num_experts=48, num_chosen=7, num_distinct=1),
    RouteCase(name="all chosen", rows=3, hidden=32, num_experts=4, num_chosen=4, num_distinct=4),
    RouteCase(name="raw scores", rows=9, hidden=96, num_experts=12, num_chosen=3, num_distinct=12, renormalize=False),
    RouteCase(name="scaled", rows=9, hidden=96, num_experts=12, num_chosen=3, num_distinct=12, scaling=2.5),
    RouteCase(name="experts of K3", rows=5, hidden=160, num_experts=896, num_chosen=16, num_distinct=896),
)
# Integers survive bfloat16, and the router works in float32 all through: its tolerance stays.
ROUTE_CASES = (*_ROUTE_FLOAT32, *(case.in_bfloat16(case.tolerance) for case in _ROUTE_FLOAT32))

_SITU_FLOAT32 = (
    SituCase(name="one row", shape=(1, 96)),
    SituCase(name="saturated", shape=(7, 48), magnitude=100.0),
    SituCase(name="near zero", shape=(3, 5, 16), magnitude=1e-3),
)
SITU_CASES = (*_SITU_FLOAT32, *(case.in_bfloat16() for case in _SITU_FLOAT32))

_EXPERTS_FLOAT32 = (
    ExpertsCase(name="one token", rows=1),
    ExpertsCase(name="many tokens", rows=67),
    ExpertsCase(name="one choice", rows=9, num_chosen=1),
    ExpertsCase(name="all experts", rows=5, num_experts=4, num_chosen=4),
    ExpertsCase(name="every token to the same experts", rows=33, load="one"),
    ExpertsCase(name="most experts idle", rows=17, num_experts=40, load="few"),
    ExpertsCase(name="no power of two", rows=6, latent=160, inner=32),
    ExpertsCase(name="top-16", rows=3, num_experts=32, num_chosen=16, inner=32),
    ExpertsCase(name="experts of K3", rows=7, num_experts=896, num_chosen=16, latent=32, inner=64),
    ExpertsCase(name="latent width of K3", rows=3, num_experts=4, latent=3584, inner=64),
    ExpertsCase(name="inner width of K3", rows=3, num_experts=4, latent=64, inner=3072),
)
EXPERTS_CASES = (*_EXPERTS_FLOAT32, *(case.in_bfloat16() for case in _EXPERTS_FLOAT32))

_STEP = "a SiTU result that differs in its last bit may round to the next step, 1/127 of its group's maximum"
INT8_CASES = tuple(
    replace(case, name=f"{case.name}, int8", int8_activations=True, tolerance=tolerance)
    for case, tolerance in (
        *((case, Tolerance(2e-2, _STEP)) for case in _EXPERTS_FLOAT32),
        *((case.in_bfloat16(), Tolerance(4e-2, f"{BFLOAT16.reason}; {_STEP}")) for case in _EXPERTS_FLOAT32),
    )
)


def route_arguments(case: RouteCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, int, bool, float]:
    """Logits are multiples of 1/16, exact in any order of summation; only biases speak for the first token."""
    x = torch.randint(-1, 2, (case.rows, case.hidden), generator=generator)
    x[0] = 0
    distinct = torch.randint(-2, 3, (case.num_distinct, case.hidden), generator=generator) / 16
    weight = distinct[torch.arange(case.num_experts) % case.num_distinct]
    levels = torch.randint(-2, 3, (case.num_distinct,), generator=generator) / 64
    bias = levels[torch.arange(case.num_experts) % case.num_distinct]
    return x.to(case.dtype), weight.to(case.dtype), bias, case.num_chosen, case.renormalize, case.scaling


def situ_arguments(case: SituCase, generator: torch.Generator) -> tuple[Tensor, Tensor, float, float]:
    """A gate of zero occurs."""
    gate, up = (case.magnitude * torch.randn(case.shape, generator=generator) for _ in range(2))
    gate[0, ..., 0] = 0.0
    return gate.to(case.dtype), up.to(case.dtype), _BETA, _LINEAR_BETA


def experts_arguments(
    case: ExpertsCase, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, ExpertTable[PackedExpert], float, float, bool]:
    """Weights of unequal size, one of them zero; row 0 of x is zero where there are others."""
    x = torch.randn(case.rows, case.latent, generator=generator)
    if case.rows > 1:
        x[0] = 0.0
    expert_ids = _choices(case, generator)
    expert_weights = torch.rand(case.rows, case.num_chosen, generator=generator).softmax(-1)
    expert_weights[-1, -1] = 0.0
    experts = []
    for _ in range(case.num_experts):
        w1, w3 = (packed_weight(case.inner, case.latent, (121, 124), generator) for _ in range(2))
        experts.append(PackedExpert(*w1, *w3, *packed_weight(case.latent, case.inner, (121, 124), generator)))
    table = ExpertTable(experts)
    return x.to(case.dtype), expert_ids, expert_weights, table, _BETA, _LINEAR_BETA, case.int8_activations


def dense_experts_arguments(
    case: ExpertsCase, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, ExpertTable[DenseExpert], float, float]:
    """The same numbers with decoded weights."""
    x, expert_ids, expert_weights, packed, beta, linear_beta, _ = experts_arguments(case, generator)
    columns = ([mxfp4_dequantize(each[at], each[at + 1], case.dtype) for each in packed] for at in (0, 2, 4))
    return x, expert_ids, expert_weights, ExpertTable.dense(*columns), beta, linear_beta


def _choices(case: ExpertsCase, generator: torch.Generator) -> Tensor:
    num_busy = case.num_experts if case.load == "spread" else case.num_chosen + (case.load == "few")
    busy = torch.randperm(case.num_experts, generator=generator)[:num_busy]
    orders = [torch.randperm(num_busy, generator=generator)[: case.num_chosen] for _ in range(case.rows)]
    return busy[torch.stack(orders)]


TABLES: dict[str, CaseTable[Any]] = {
    "moe_route": CaseTable(ROUTE_CASES, route_arguments),
    "situ": CaseTable(SITU_CASES, situ_arguments),
    "moe_experts": CaseTable(EXPERTS_CASES, dense_experts_arguments),
    "moe_experts_mxfp4": CaseTable((*EXPERTS_CASES, *INT8_CASES), experts_arguments),
}
