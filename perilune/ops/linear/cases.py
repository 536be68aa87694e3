"""Cases of the dense linear."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable


@dataclass(frozen=True, kw_only=True)
class LinearCase(Case):
    """x [rows, columns] times weight [outputs, columns]."""

    rows: int
    columns: int
    outputs: int


_FLOAT32 = (
    LinearCase(name="one row", rows=1, columns=96, outputs=80),
    LinearCase(name="few rows", rows=5, columns=160, outputs=48),
    LinearCase(name="many rows", rows=67, columns=64, outputs=112),
    LinearCase(name="one output", rows=3, columns=32, outputs=1),
    LinearCase(name="long sum", rows=2, columns=7168, outputs=16),
)
CASES = (*_FLOAT32, *(case.in_bfloat16() for case in _FLOAT32))


def arguments(case: LinearCase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first row of x and of the weight is zero."""
    x = torch.randn(case.rows, case.columns, generator=generator)
    weight = torch.randn(case.outputs, case.columns, generator=generator) * case.columns**-0.5
    if case.rows > 1:
        x[0] = 0.0
    if case.outputs > 1:
        weight[0] = 0.0
    return x.to(case.dtype), weight.to(case.dtype)


TABLES = {"dense_linear": CaseTable(CASES, arguments)}
