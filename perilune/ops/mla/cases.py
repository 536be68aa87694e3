"""Cases of latent attention, plain and absorbed."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perilune.ops.case import LAYOUTS, Case, CaseTable, Layout, Tolerance, paged
from perilune.ops.packed_rows.cases import packed_pool
from perilune.ops.packed_rows.layout import EIGHT_BIT

_ROUNDED = Tolerance(4e-2, "plain and absorbed form round keys, values, queries and sums to bfloat16 in other places")


@dataclass(frozen=True, kw_only=True)
class LatentCase(Case):
    """Sizes of one call; `topk` None attends to every row a query can see, else to that many at most.

    `values` None caches rows as they are, else packed with such values.
    """

    layout: Layout
    heads: int = 3
    nope: int = 32
    shared: int = 16
    latent: int = 48
    value: int = 32
    block_size: int = 16
    topk: int | None = None
    values: torch.dtype | None = None


_MIXED, _LONG = LAYOUTS["lengths differ"], LAYOUTS["decode and long"]
_FLOAT32 = (
    *(LatentCase(name=name, layout=layout) for name, layout in LAYOUTS.items()),
    LatentCase(name="small blocks", layout=_MIXED, block_size=4),
    LatentCase(name="all in one block", layout=_LONG, block_size=96),
    LatentCase(name="few of many rows", layout=_LONG, topk=8),
    LatentCase(name="more than there are", layout=_MIXED, topk=200),
    LatentCase(name="one row", layout=_MIXED, topk=1),
    LatentCase(name="value wider than key", layout=_MIXED, nope=16, shared=32, latent=96, value=80),
    LatentCase(
        name="two heads of K3", layout=Layout((1, 9), (50, 8)), heads=2, nope=128, shared=64, latent=512, value=128
    ),
    # keys go in blocks of 96, ranges of 768; heads and queries in vectors and in groups of 96
    LatentCase(name="borders of blocks", layout=Layout((1, 1, 2), (95, 96, 190)), heads=19),
    LatentCase(name="several blocks selected", layout=Layout((1, 2), (250, 190)), heads=2, topk=192),
    LatentCase(name="ranges", layout=Layout((1, 1), (1600, 767)), heads=2, nope=16, latent=16, value=16, block_size=64),
    LatentCase(name="more queries than a group", layout=Layout((99,), (70,)), heads=1, nope=16, latent=16, value=16),
    LatentCase(name="long context", layout=Layout((1, 1, 2), (600, 5, 250)), heads=2, topk=64),
)
_PACKED = tuple(
    replace(case, name=f"{case.name}, {str(values).removeprefix('torch.')} rows", values=values)
    for values in EIGHT_BIT
    for case in _FLOAT32
)
_ALL = (*_FLOAT32, *_PACKED)
CASES = (*_ALL, *(case.in_bfloat16(_ROUNDED) for case in _ALL))

_Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor | None]


def arguments(case: LatentCase, generator: torch.Generator) -> _Arguments:
    """Unused rows and blocks hold NaN; scores spread wide enough for some sharp softmaxes."""
    layout, width = case.layout, case.nope + case.shared
    q = 2 * torch.randn(layout.num_tokens, case.heads, width, generator=generator)
    rows = [
        torch.randn(length, case.latent + case.shared, generator=generator).to(case.dtype)
        for length in layout.seq_lens.tolist()
    ]
    w_uk = torch.randn(case.heads, case.nope, case.latent, generator=generator) * case.latent**-0.5
    w_uv = torch.randn(case.heads, case.value, case.latent, generator=generator) * case.latent**-0.5
    q, w_uk, w_uv = (x.to(case.dtype) for x in (q, w_uk, w_uv))
    selected = None if case.topk is None else random_selection(layout, case.topk, generator)
    pool, table = paged(rows, case.block_size, generator)
    place = (packed_pool(pool, case.values, case.latent), table, layout.seq_lens, layout.cu_seqlens)
    return q, *place, w_uk, w_uv, width**-0.5, selected


def random_selection(layout: Layout, topk: int, generator: torch.Generator) -> Tensor:
    """[T, topk] distinct positions that each query may see, in any order, then -1."""
    selected = torch.full((layout.num_tokens, topk), -1)
    for token, position in enumerate(layout.positions.tolist()):
        chosen = torch.randperm(position + 1, generator=generator)[:topk]
        selected[token, : chosen.shape[0]] = chosen
    return selected


TABLES = {"mla_prefill": CaseTable(CASES, arguments), "mla_decode": CaseTable(CASES, arguments)}
