"""Cases of the MXFP4 linear."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable
from perilune.ops.mxfp4.reference import GROUP_SIZE


@dataclass(frozen=True, kw_only=True)
class PackedCase(Case):
    """x [*rows, columns] times a packed weight [outputs, columns] whose scale bytes lie in `scales` (both included).

    From 2 on no weight is subnormal; below, the bfloat16 dot products of some processors take weights for zero.
    """

    rows: tuple[int, ...]
    columns: int
    outputs: int
    scales: tuple[int, int] = (118, 122)
    magnitude: float = 1.0  # of x; brings results of extreme scales back into float32's range


_FLOAT32 = (
    PackedCase(name="one row", rows=(1,), columns=96, outputs=80),
    PackedCase(name="few rows", rows=(5,), columns=160, outputs=48),
    PackedCase(name="many rows", rows=(3, 23), columns=64, outputs=112),
    PackedCase(name="one group", rows=(2,), columns=32, outputs=16),
    PackedCase(name="smallest scales", rows=(3,), columns=64, outputs=32, scales=(2, 5), magnitude=2.0**30),
    PackedCase(name="largest scales", rows=(3,), columns=64, outputs=32, scales=(248, 251), magnitude=2.0**-30),
    PackedCase(name="scales far apart", rows=(3,), columns=256, outputs=32, scales=(87, 167)),
)
CASES = (*_FLOAT32, *(case.in_bfloat16() for case in _FLOAT32))


def arguments(case: PackedCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales are uniform, and the first group goes through all sixteen codes in both nibbles."""
    packed, scale = packed_weight(case.outputs, case.columns, case.scales, generator)
    packed[0, : GROUP_SIZE // 2] = torch.arange(16, dtype=torch.uint8) * 16 + torch.arange(15, -1, -1)
    x = case.magnitude * torch.randn(*case.rows, case.columns, generator=generator)
    return x.to(case.dtype), packed, scale


def packed_weight(
    outputs: int, columns: int, scales: tuple[int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random codes [outputs, columns / 2] and scale bytes [outputs, columns / 32]."""
    packed = torch.randint(256, (outputs, columns // 2), generator=generator, dtype=torch.uint8)
    size = (outputs, columns // GROUP_SIZE)
    return packed, torch.randint(scales[0], scales[1] + 1, size, generator=generator, dtype=torch.uint8)


TABLES = {"mxfp4_linear": CaseTable(CASES, arguments)}
