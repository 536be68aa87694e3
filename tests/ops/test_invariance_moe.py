"""A token's experts and their sum are the same to the bit alone and among others."""

from dataclasses import replace

import pytest
import torch

from perilune import ops
from perilune.ops.moe import native
from perilune.ops.moe.cases import ExpertsCase, RouteCase, dense_experts_arguments, experts_arguments, route_arguments

NUM_TOKENS = 64
pytestmark = pytest.mark.usefixtures("isa", "num_threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "num_experts"), [(48, 24), (1040, 70)])
def test_a_token_alone_is_routed_as_among_others(hidden, num_experts, dtype):
    case = RouteCase(name="", rows=NUM_TOKENS, hidden=hidden, num_experts=num_experts, num_chosen=5, num_distinct=70)
    _, weight, bias, *rest = route_arguments(replace(case, dtype=dtype), torch.Generator().manual_seed(0))
    x = torch.randn(NUM_TOKENS, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = ops.moe_route(x, weight, bias, *rest)
    alone = zip(*[ops.moe_route(x[i : i + 1], weight, bias, *rest) for i in range(NUM_TOKENS)], strict=True)
    for expected, found in zip(together, alone, strict=True):
        assert torch.equal(expected, torch.cat(found))


def pass_of(case):
    """The expert pass over any of its tokens."""
    if case.name == "dense":
        op, (x, ids, weights, *rest) = ops.moe_experts, dense_experts_arguments(case, torch.Generator().manual_seed(0))
    else:
        op, (x, ids, weights, *rest) = ops.moe_experts_mxfp4, experts_arguments(case, torch.Generator().manual_seed(0))
    return lambda tokens: op(x[tokens], ids[tokens], weights[tokens], *rest)


CASES = [
    ExpertsCase(name=name, rows=NUM_TOKENS, latent=latent, inner=inner, num_chosen=4, int8_activations=name == "int8")
    for name in ("dense", "packed", "int8")
    for latent, inner in [(96, 64), (64, 1056)]
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.latent}x{case.inner}")
def test_a_token_alone_meets_its_experts_as_among_others(case, dtype):
    over = pass_of(replace(case, dtype=dtype))
    alone = [over(slice(i, i + 1)) for i in range(NUM_TOKENS)]
    assert torch.equal(over(slice(NUM_TOKENS)), torch.cat(alone))


@pytest.mark.parametrize("scratch_bytes", [1, 40_000, 300_000])
def test_little_memory_changes_nothing(scratch_bytes, monkeypatch):
    over = pass_of(CASES[2])
    expected = over(slice(NUM_TOKENS))
    monkeypatch.setattr(native, "SCRATCH_BYTES", scratch_bytes)
    assert torch.equal(expected, over(slice(NUM_TOKENS)))
