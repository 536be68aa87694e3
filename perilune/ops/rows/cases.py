"""Cases of the row ops."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable, Tolerance

_EXACT = Tolerance(0.0, "every number is moved or rounded once")
_BETWEEN = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}


@dataclass(frozen=True, kw_only=True)
class RowCase(Case):
    """`rows` of `width`; with `converts` the table or pool has the other dtype."""

    rows: int
    width: int
    converts: bool = False

    @property
    def stored_dtype(self) -> torch.dtype:
        return _BETWEEN[self.dtype] if self.converts else self.dtype


_SIZES = (
    RowCase(name="one row", rows=1, width=160),
    RowCase(name="odd width", rows=3, width=37),
    RowCase(name="hidden size of K3", rows=5, width=7168),
    RowCase(name="more than a chunk", rows=40, width=1040),
)
_FLOAT32 = (*_SIZES, RowCase(name="other dtype", rows=7, width=96, converts=True))
EXACT_CASES = tuple(
    exact
    for case in _FLOAT32
    for exact in (RowCase(**{**vars(case), "tolerance": _EXACT}), case.in_bfloat16(tolerance=_EXACT))
)
CASES = (*_SIZES, *(case.in_bfloat16() for case in _SIZES))


def embed_rows_arguments(case: RowCase, generator: torch.Generator) -> tuple[Tensor, Tensor, torch.dtype]:
    """Ids repeat."""
    weight = torch.randn(case.rows + 9, case.width, generator=generator).to(case.stored_dtype)
    return weight, torch.randint(0, case.rows + 9, (case.rows,), generator=generator), case.dtype


def store_rows_arguments(case: RowCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A pool of blocks of four rows; slots differ."""
    pool = torch.randn(-(-case.rows // 4) + 2, 4, case.width, generator=generator).to(case.stored_dtype)
    slots = torch.randperm(pool.shape[0] * 4, generator=generator)[: case.rows]
    return pool, slots, torch.randn(case.rows, case.width, generator=generator).to(case.dtype)


def append_rows_arguments(case: RowCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that fill a pool but for one before and one behind them."""
    pool = torch.randn(case.rows + 2, case.width, generator=generator).to(case.stored_dtype)
    return (
        pool,
        torch.ones(1, dtype=torch.int64),
        torch.randn(case.rows, case.width, generator=generator).to(case.dtype),
    )


def join_rows_arguments(case: RowCase, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Parts of one row, none, and the case's rows."""
    rows = torch.randn(case.rows + 1, case.width, generator=generator).to(case.dtype)
    return rows[:1], rows[1:1], rows[1:]


def pair_arguments(case: RowCase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The second reaches far into both tails of the sigmoid."""
    x, z = (scale * torch.randn(case.rows, case.width, generator=generator) for scale in (1, 10))
    return x.to(case.dtype), z.to(case.dtype)


def scale_rows_arguments(case: RowCase, generator: torch.Generator) -> tuple[Tensor, float]:
    """A factor that is no power of two."""
    return torch.randn(case.rows, case.width, generator=generator).to(case.dtype), 0.0110485


_NOT_CONVERTING = tuple(case for case in EXACT_CASES if not case.converts)
TABLES = {
    "embed_rows": CaseTable(EXACT_CASES, embed_rows_arguments),
    "store_rows": CaseTable(EXACT_CASES, store_rows_arguments),
    "append_rows": CaseTable(EXACT_CASES, append_rows_arguments),
    "join_rows": CaseTable(_NOT_CONVERTING, join_rows_arguments),
    "add_rows": CaseTable(_NOT_CONVERTING, pair_arguments),
    "gate_rows": CaseTable(CASES, pair_arguments),
    "swiglu": CaseTable(CASES, pair_arguments),
    "scale_rows": CaseTable(_NOT_CONVERTING, scale_rows_arguments),
}
