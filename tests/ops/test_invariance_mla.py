"""A token attends the same to the bit alone and among others, whatever sequences and tokens share the call."""

from dataclasses import replace

import pytest
import torch

from perilune import ops
from perilune.ops.case import Layout
from perilune.ops.mla.cases import LatentCase, arguments

OPS = ("mla_prefill", "mla_decode")
pytestmark = pytest.mark.usefixtures("isa", "num_threads")

# 64 queries in all; contexts across the borders of blocks (96) and ranges (768)
MANY = Layout((1, 40, 3, 1, 1, 16, 2), (900, 85, 0, 1599, 95, 760, 191))
CASES = [
    LatentCase(name="dense", layout=MANY, heads=5, latent=32),
    LatentCase(name="selected", layout=MANY, heads=5, latent=32, topk=100),
    LatentCase(name="fp8 rows", layout=MANY, heads=5, latent=32, values=torch.float8_e4m3fn),
    LatentCase(name="int8 rows, selected", layout=MANY, heads=5, latent=144, topk=100, values=torch.int8),
    LatentCase(name="many heads", layout=Layout((1, 7), (100, 100)), heads=33, latent=32),
]


def call(op_name, given, n, tokens):
    """The op for some of sequence n's last tokens alone."""
    q, rows, table, seq_lens, ends, *rest, selected = given
    first, end = int(ends[n]) + tokens.start, int(ends[n]) + tokens.stop
    length = seq_lens[n : n + 1] - (int(ends[n + 1]) - end)
    own = None if selected is None else selected[first:end]
    count = torch.tensor([0, end - first])
    return getattr(ops, op_name)(q[first:end], rows, table[n : n + 1], length, count, *rest, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op_name", OPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_token_alone_attends_as_among_others(op_name, case, dtype):
    given = arguments(replace(case, dtype=dtype), torch.Generator().manual_seed(0))
    together = getattr(ops, op_name)(*given)
    alone = [
        call(op_name, given, n, slice(i, i + 1)) for n, length in enumerate(case.layout.new) for i in range(length)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("op_name", OPS)
@pytest.mark.parametrize("cut", [1, 7, 33])
def test_a_prompt_in_pieces_is_the_prompt_in_one(op_name, cut):
    given = arguments(replace(CASES[0], dtype=torch.bfloat16), torch.Generator().manual_seed(0))
    pieces = [call(op_name, given, 1, slice(0, cut)), call(op_name, given, 1, slice(cut, 40))]
    assert torch.equal(call(op_name, given, 1, slice(0, 40)), torch.cat(pieces))


@pytest.mark.parametrize("op_name", OPS)
def test_a_neighbour_that_needs_a_selection_changes_nothing(op_name):
    """Sequences within top-k take no selection when alone, and one of all their rows beside a longer one."""
    *given, selected = arguments(replace(CASES[1], topk=800), torch.Generator().manual_seed(0))
    beside = getattr(ops, op_name)(*given, selected)
    dense = getattr(ops, op_name)(*given, None)
    within = torch.tensor([int(seen) <= 800 for seen in (MANY.positions + 1)])
    assert within.any()
    assert not within.all()
    assert torch.equal(beside[within], dense[within])
