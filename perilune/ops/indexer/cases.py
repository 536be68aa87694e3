"""Cases of the indexer.

Queries, keys and weights are small integers, so that every score is exact in float32 in any order of summation: the
selection has one right answer, and there are ties to break.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perilune.ops.case import LAYOUTS, Case, CaseTable, Layout, Tolerance, paged
from perilune.ops.packed_rows.cases import packed_pool
from perilune.ops.packed_rows.layout import DTYPES

_EXACT = Tolerance(0.0, "positions are integers, and scores of small integers are exact")


@dataclass(frozen=True, kw_only=True)
class IndexerCase(Case):
    """`topk` positions a query; keys are drawn from `num_distinct` different ones, None draws each anew.

    `values` None caches keys as they are, else packed with such values: exactly, being small integers.
    """

    layout: Layout
    heads: int = 4
    width: int = 32
    block_size: int = 16
    topk: int = 8
    num_distinct: int | None = None
    values: torch.dtype | None = None
    tolerance: Tolerance = _EXACT


_MIXED, _LONG = LAYOUTS["lengths differ"], LAYOUTS["decode and long"]
_FLOAT32 = (
    *(IndexerCase(name=name, layout=layout) for name, layout in LAYOUTS.items()),
    IndexerCase(name="fewer rows than top-k", layout=_MIXED, topk=100),
    IndexerCase(name="as many rows as top-k", layout=Layout((1, 3), (31, 29)), topk=32),
    IndexerCase(name="best row only", layout=_LONG, topk=1, block_size=4),
    IndexerCase(name="many ties", layout=_LONG, topk=16, num_distinct=3),
    IndexerCase(name="every row ties", layout=_LONG, topk=16, num_distinct=1),
    IndexerCase(name="context far above top-k", layout=Layout((1, 1, 5), (900, 20, 400)), topk=48),
    IndexerCase(name="heads of K3.1", layout=_LONG, heads=32, width=128, topk=32),
)
_PACKED = tuple(
    replace(case, name=f"{case.name}, {str(values).removeprefix('torch.')} keys", values=values)
    for values in DTYPES
    for case in _FLOAT32
)
_ALL = (*_FLOAT32, *_PACKED)
CASES = (*_ALL, *(case.in_bfloat16(_EXACT) for case in _ALL))

_Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]


def arguments(case: IndexerCase, generator: torch.Generator) -> _Arguments:
    """Unused rows and blocks hold NaN; negative and zero head weights occur, so that 0 and -0 tie."""
    layout = case.layout

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator)

    q = integers(layout.num_tokens, case.heads, case.width).to(case.dtype)
    weights = integers(layout.num_tokens, case.heads) / 8
    keys = []
    for length in layout.seq_lens.tolist():
        if case.num_distinct is None:
            keys.append(integers(length, case.width).to(case.dtype))
        else:
            distinct = integers(case.num_distinct, case.width).to(case.dtype)
            keys.append(distinct[torch.randint(case.num_distinct, (length,), generator=generator)])
    pool, table = paged(keys, case.block_size, generator)
    pool = packed_pool(pool, case.values, case.width)
    return q, weights, pool, table, layout.seq_lens, layout.cu_seqlens, case.topk


TABLES = {"indexer_topk": CaseTable(CASES, arguments)}
