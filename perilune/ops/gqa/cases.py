"""Cases of grouped-query attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.ops.case import LAYOUTS, Case, CaseTable, Layout, Tolerance, paged

_ROUNDED = Tolerance(4e-2, "probabilities and sums are rounded to bfloat16 in other places")


@dataclass(frozen=True, kw_only=True)
class GroupedCase(Case):
    """`groups` key heads of `width`, each read by `readers` query heads."""

    layout: Layout
    groups: int = 2
    readers: int = 3
    width: int = 32
    block_size: int = 16


@dataclass(frozen=True, kw_only=True)
class RowsCase(Case):
    """`tokens` rows of `groups` heads of `width`."""

    tokens: int
    groups: int
    width: int
    is_interleaved: bool = False


_MIXED = LAYOUTS["lengths differ"]
_FLOAT32 = (
    *(GroupedCase(name=name, layout=layout) for name, layout in LAYOUTS.items()),
    GroupedCase(name="small blocks", layout=_MIXED, block_size=4),
    GroupedCase(name="one head reads one", layout=_MIXED, readers=1, groups=3),
    GroupedCase(name="all heads read one", layout=_MIXED, readers=5, groups=1, width=16),
    GroupedCase(name="long context", layout=Layout((1, 1, 7), (600, 5, 250)), width=64),
    GroupedCase(name="heads of a draft of K3", layout=Layout((7,), (90,)), groups=16, readers=4, width=64),
)
CASES = (*_FLOAT32, *(case.in_bfloat16(_ROUNDED) for case in _FLOAT32))
_ROWS = (
    RowsCase(name="one row", tokens=1, groups=2, width=32),
    RowsCase(name="adjacent pairs", tokens=9, groups=3, width=48, is_interleaved=True),
    RowsCase(name="heads of a draft of K3", tokens=5, groups=16, width=64),
)
ROWS_CASES = (*_ROWS, *(case.in_bfloat16() for case in _ROWS))


def attention_arguments(
    case: GroupedCase, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """Unused rows and blocks hold NaN; scores spread wide enough for some sharp softmaxes."""
    layout = case.layout
    q = 2 * torch.randn(layout.num_tokens, case.groups * case.readers, case.width, generator=generator)
    rows = [
        torch.randn(length, 2 * case.groups * case.width, generator=generator).to(case.dtype)
        for length in layout.seq_lens.tolist()
    ]
    pool, table = paged(rows, case.block_size, generator)
    return q.to(case.dtype), pool, table, layout.seq_lens, layout.cu_seqlens, case.width**-0.5


def rows_arguments(case: RowsCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, float, Tensor, bool]:
    """Any turns will do."""
    k, v = (torch.randn(case.tokens, case.groups * case.width, generator=generator) for _ in range(2))
    norm = 1 + 0.3 * torch.randn(case.width, generator=generator)
    angles = 6 * torch.rand(case.tokens, case.width // 2, generator=generator)
    turns = 1.1 * torch.cat((angles.cos(), angles.sin()), dim=-1)
    k, v, norm = (x.to(case.dtype) for x in (k, v, norm))
    return k, v, norm, 1e-5, turns, case.is_interleaved


TABLES: dict[str, CaseTable[Any]] = {
    "gqa_attention": CaseTable(CASES, attention_arguments),
    "gqa_rows": CaseTable(ROWS_CASES, rows_arguments),
}
