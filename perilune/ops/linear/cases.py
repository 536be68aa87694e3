"""Cases of the linear maps."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable, Tolerance
from perilune.ops.linear.reference import quantize_rows
from perilune.ops.linear.weights import LARGEST, ChannelScaled, LinearWeight, WeightGroup, unfilled

# A weight of x's dtype ("own"), or narrower than x.
Kind = Literal["own", "bfloat16", "int8", "fp8"]
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True)
class LinearCase(Case):
    """x [rows, columns] times weight [outputs, columns]."""

    rows: int
    columns: int
    outputs: int
    kind: Kind = "own"
    int8_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupCase(Case):
    """x [rows, columns] times one weight [outputs, columns] for each entry of `outputs`."""

    rows: int
    columns: int
    outputs: tuple[tuple[int, Kind], ...]
    int8_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class QuantizeCase(Case):
    """A weight [rows, columns] to 8 bits."""

    rows: int
    columns: int
    kind: Kind


_OWN = (
    LinearCase(name="one row", rows=1, columns=96, outputs=80),
    LinearCase(name="few rows", rows=5, columns=160, outputs=48),
    LinearCase(name="many rows", rows=67, columns=64, outputs=112),
    LinearCase(name="one output", rows=3, columns=32, outputs=1),
    LinearCase(name="long sum", rows=2, columns=7168, outputs=16),
)
_NARROW = (
    LinearCase(name="bfloat16 weight", rows=7, columns=96, outputs=80, kind="bfloat16"),
    *(
        LinearCase(name=f"{kind} weight, {name}", rows=rows, columns=columns, outputs=outputs, kind=kind)
        for kind in ("int8", "fp8")
        for name, rows, columns, outputs in [
            ("one row", 1, 160, 80),
            ("many rows", 33, 96, 48),
            ("long sum", 2, 7168, 16),
            ("no multiple of 32", 5, 48, 24),
        ]
    ),
)
_INT8 = (
    *(
        LinearCase(
            name=f"int8 activations, {name}",
            rows=rows,
            columns=columns,
            outputs=outputs,
            kind="int8",
            int8_activations=True,
        )
        for name, rows, columns, outputs in [
            ("one row", 1, 160, 80),
            ("many rows", 33, 96, 48),
            ("long sum", 2, 7168, 16),
            ("short last group", 5, 48, 24),
        ]
    ),
    LinearCase(name="exact without int8 weight", rows=3, columns=64, outputs=32, int8_activations=True),
)
_FLOAT32 = (*_OWN, *_NARROW, *_INT8)
CASES = (*_FLOAT32, *(case.in_bfloat16() for case in _FLOAT32))

_GROUPS = (
    GroupCase(name="one weight", rows=3, columns=64, outputs=((48, "own"),)),
    GroupCase(name="heads and widths", rows=1, columns=256, outputs=((96, "own"), (96, "own"), (4, "own"), (1, "own"))),
    GroupCase(name="many rows", rows=67, columns=96, outputs=((80, "own"), (16, "own"), (112, "own"))),
    GroupCase(name="int8", rows=5, columns=160, outputs=((48, "int8"), (4, "int8"), (64, "int8"))),
    GroupCase(name="fp8", rows=5, columns=160, outputs=((48, "fp8"), (4, "fp8"), (64, "fp8"))),
    GroupCase(name="mixed", rows=9, columns=64, outputs=((32, "int8"), (48, "bfloat16"), (16, "own"), (16, "fp8"))),
    GroupCase(
        name="mixed, int8 activations",
        rows=9,
        columns=64,
        outputs=((32, "int8"), (48, "bfloat16"), (16, "int8")),
        int8_activations=True,
    ),
)
GROUP_CASES = (*_GROUPS, *(case.in_bfloat16() for case in _GROUPS))

_EXACT = Tolerance(0.0, "one rounding, and the same one")
_QUANTIZE = tuple(
    QuantizeCase(name=f"{kind}, {name}", rows=rows, columns=columns, kind=kind, tolerance=_EXACT)
    for kind in ("int8", "fp8")
    for name, rows, columns in [("one zero row", 1, 16), ("small", 7, 33), ("many rows", 67, 96), ("long", 4, 7168)]
)
QUANTIZE_CASES = (*_QUANTIZE, *(case.in_bfloat16(_EXACT) for case in _QUANTIZE))


def arguments(case: LinearCase, generator: torch.Generator) -> tuple[Tensor, LinearWeight, bool]:
    """The first row of x and of the weight is zero."""
    x = _rows(case.rows, case.columns, generator).to(case.dtype)
    weight = _weight(case.outputs, case.columns, case.kind, case.dtype, generator)
    return x, weight, case.int8_activations


def group_arguments(case: GroupCase, generator: torch.Generator) -> tuple[Tensor, WeightGroup, bool]:
    """The same for several weights."""
    x = _rows(case.rows, case.columns, generator).to(case.dtype)
    weights = [_weight(outputs, case.columns, kind, case.dtype, generator) for outputs, kind in case.outputs]
    return x, WeightGroup(*weights), case.int8_activations


def _rows(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, columns, generator=generator)
    if rows > 1:
        x[0] = 0.0
    return x


def _weight(outputs: int, columns: int, kind: Kind, dtype: torch.dtype, generator: torch.Generator) -> LinearWeight:
    weight = torch.randn(outputs, columns, generator=generator) * columns**-0.5
    if outputs > 1:
        weight[0] = 0.0
    if kind in ("own", "bfloat16"):
        return weight.to(dtype if kind == "own" else torch.bfloat16)
    quantised = unfilled(outputs, columns, _DTYPES[kind])
    quantize_rows(weight, quantised)
    return quantised


def quantize_arguments(case: QuantizeCase, generator: torch.Generator) -> tuple[Tensor, ChannelScaled]:
    """Rows of very different size, the first one zero; the second goes through halves between two numbers."""
    weight = torch.randn(case.rows, case.columns, generator=generator)
    weight *= torch.logspace(-6, 6, case.rows)[:, None]
    weight[0] = 0.0
    if case.rows > 1:
        largest = LARGEST[_DTYPES[case.kind]]
        weight[1] = (torch.arange(case.columns) / 2 - 8.0).clamp(-largest, largest)
        weight[1, 0] = largest
    return weight.to(case.dtype), unfilled(case.rows, case.columns, _DTYPES[case.kind])


TABLES: dict[str, CaseTable[Any]] = {
    "dense_linear": CaseTable(CASES, arguments),
    "linear_group": CaseTable(GROUP_CASES, group_arguments),
    "quantize_rows": CaseTable(QUANTIZE_CASES, quantize_arguments),
}
