"""Cases of storing packed rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable, Tolerance
from perilune.ops.packed_rows.layout import DTYPES, MXFP4, row_bytes
from perilune.ops.packed_rows.reference import pack

_EXACT = Tolerance(0.0, "every number is rounded once")


@dataclass(frozen=True, kw_only=True)
class PackedCase(Case):
    """`num_rows` of `num_scaled` quantised columns and `num_further` as they are."""

    values: torch.dtype
    num_rows: int
    num_scaled: int
    num_further: int = 0
    tolerance: Tolerance = _EXACT


def packed_pool(pool: Tensor, values: torch.dtype | None, num_scaled: int) -> Tensor:
    """A pool of rows [blocks, block_size, D] as one of packed rows; None leaves it."""
    return pool if values is None else pack(pool, values, num_scaled).view(values)


def _cases() -> list[PackedCase]:
    cases = []
    for values in DTYPES:
        sizes = {"one key": (1, 128, 0), "narrow": (5, 32, 0), "many": (40, 160, 0)}
        if values is not MXFP4:
            sizes |= {"latents of K3": (9, 512, 64), "odd groups": (7, 144, 16), "odd rest": (3, 16, 6)}
        for name, (rows, scaled, further) in sizes.items():
            kind = str(values).removeprefix("torch.")
            case = PackedCase(
                name=f"{name}, {kind}", values=values, num_rows=rows, num_scaled=scaled, num_further=further
            )
            cases += [case, case.in_bfloat16(_EXACT)]
    return cases


def arguments(case: PackedCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, int]:
    """A pool of blocks of four rows; magnitudes from 2^-20 to 2^20, zeros and halves between neighbours among them."""
    width = case.num_scaled + case.num_further
    num_bytes = row_bytes(case.values, case.num_scaled, width)
    num_blocks = -(-case.num_rows // 4) + 2
    pool = torch.randint(0, 256, (num_blocks, 4, num_bytes), dtype=torch.uint8, generator=generator).view(case.values)
    slots = torch.randperm(num_blocks * 4, generator=generator)[: case.num_rows]
    rows = torch.randn(case.num_rows, width, generator=generator)
    rows = (rows * 32).round() / 32  # many lie half-way under scales that are powers of two
    rows *= torch.exp2(torch.randint(-20, 21, (case.num_rows, 1), generator=generator).float())
    return pool, slots, rows.to(case.dtype), case.num_scaled


TABLES = {"store_packed_rows": CaseTable(tuple(_cases()), arguments)}
