"""A query selects the same alone and among others, over every format of keys."""

from dataclasses import replace

import pytest
import torch

from perilune import ops
from perilune.ops.case import Layout
from perilune.ops.indexer.cases import IndexerCase, arguments
from perilune.ops.packed_rows.cases import packed_pool
from perilune.ops.packed_rows.layout import DTYPES

pytestmark = pytest.mark.usefixtures("isa", "num_threads")

# contexts across the borders of blocks (48) and ranges (768), queries across groups (8)
MANY = Layout((1, 20, 3, 1, 1, 9), (900, 85, 0, 1599, 47, 760))


def given_for(heads, dtype, values):
    """Real numbers, whose sums depend on their order."""
    case = IndexerCase(name="many", layout=MANY, heads=heads, width=64, topk=40)
    generator = torch.Generator().manual_seed(0)
    q, weights, keys, *rest = arguments(replace(case, dtype=dtype), generator)
    q, weights = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (q, weights))
    keys = packed_pool(torch.randn(keys.shape, generator=generator).to(dtype), values, case.width)
    return q, weights, keys, *rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [None, *DTYPES])
@pytest.mark.parametrize("heads", [5, 32])
def test_a_query_alone_selects_as_among_others(heads, values, dtype):
    q, weights, keys, table, seq_lens, ends, topk = given_for(heads, dtype, values)
    together = ops.indexer_topk(q, weights, keys, table, seq_lens, ends, topk)
    one, alone = torch.tensor([0, 1]), []
    for n, length in enumerate(MANY.new):
        for i in range(length):
            token, seen = int(ends[n]) + i, seq_lens[n : n + 1] - (length - 1 - i)
            own = slice(token, token + 1)
            alone.append(ops.indexer_topk(q[own], weights[own], keys, table[n : n + 1], seen, one, topk))
    assert torch.equal(together, torch.cat(alone))
