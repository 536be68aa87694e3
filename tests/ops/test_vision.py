import math

import pytest
import torch

from perilune import ops
from perilune.ops.vision import reference
from tests.ops.calls import assert_close, assert_gradients_agree, call, case_named, cases, make_arguments


def turned(x, turn):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def naive_attention(qkv, cos, sin, cu_seqlens, queries):
    """One patch and one head at a time, pairs as complex numbers, in float64."""
    qkv = qkv.double()
    turn = torch.complex(cos.double(), sin.double())
    rows = []
    for first, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for patch in range(first, end):
            heads = []
            for head in range(qkv.shape[2]):
                q = turned(qkv[patch, 0, head], turn[patch])
                k = turned(qkv[first:end, 1, head], turn[first:end])
                weights = ((k @ q) / math.sqrt(qkv.shape[-1])).softmax(0)
                heads.append(weights @ qkv[first:end, 2, head])
            rows.append(torch.stack(heads))
    return torch.stack(rows)[queries]


def naive_gelu(x):
    x = x.double()
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


NAIVE = {"patch_attention": naive_attention, "gelu_tanh": naive_gelu}


@cases(*NAIVE)
def test_the_vision_ops_follow_their_formulas(op_name, case):
    given = make_arguments(op_name, case)
    result, _ = call(op_name, given)
    assert result.dtype is case.dtype
    assert_close(NAIVE[op_name](*given), result, case.tolerance)


def test_blocks_of_queries_change_nothing(monkeypatch):
    given = make_arguments("patch_attention", case_named("patch_attention", "pictures of different sizes"))
    whole = reference.patch_attention(*given)
    monkeypatch.setattr(reference, "_MOST_SCORES", 500)
    torch.testing.assert_close(reference.patch_attention(*given), whole, rtol=1e-4, atol=1e-5)


def test_gradients_reach_queries_keys_and_values():
    given = make_arguments("patch_attention", case_named("patch_attention", "narrow heads"))
    assert_gradients_agree(ops.patch_attention.reference, naive_attention, given, [0])


def test_a_row_that_no_kernel_takes_is_refused_with_the_reason():
    given = make_arguments("patch_attention", case_named("patch_attention", "narrow heads"))
    key = ops.patch_attention.key(given[0][..., :8], given[1][:, :4], given[2][:, :4], *given[3:])
    native = next(item for item in ops.patch_attention.explain(key) if item.backend == "native")
    assert native.refusal is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("isa", "num_threads")
def test_a_picture_alone_equals_itself_among_others(dtype):
    generator = torch.Generator().manual_seed(0)
    counts = [4, 97, 12, 460]
    qkv = torch.randn(sum(counts), 3, 2, 32, generator=generator).to(dtype)
    angles = torch.rand(sum(counts), 16, generator=generator)
    cos, sin, cu_seqlens = angles.cos(), angles.sin(), torch.tensor([0, *counts]).cumsum(0)
    alone = [
        ops.patch_attention(*(x[first:end] for x in (qkv, cos, sin)), torch.tensor([0, end - first]), slice(None))
        for first, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    ]
    assert torch.equal(ops.patch_attention(qkv, cos, sin, cu_seqlens, slice(None)), torch.cat(alone))
    pieces = [ops.patch_attention(qkv, cos, sin, cu_seqlens, slice(first, first + 50)) for first in range(0, 600, 50)]
    assert torch.equal(torch.cat(pieces), torch.cat(alone))
