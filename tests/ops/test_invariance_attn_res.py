"""A token's mix is the same to the bit alone and among others."""

import pytest
import torch

from perilune import ops

NUM_TOKENS = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_candidates", "width"), [(1, 96), (4, 48), (9, 1040)])
@pytest.mark.usefixtures("isa", "num_threads")
def test_a_token_alone_equals_itself_among_others(num_candidates, width, dtype):
    generator = torch.Generator().manual_seed(0)
    candidates = [torch.randn(NUM_TOKENS, width, generator=generator).to(dtype) for _ in range(num_candidates)]
    query, weight = torch.randn(width, generator=generator), torch.randn(width, generator=generator).to(dtype)
    alone = [ops.attn_res_mix([rows[i : i + 1] for rows in candidates], query, weight, 1e-5) for i in range(NUM_TOKENS)]
    assert torch.equal(ops.attn_res_mix(candidates, query, weight, 1e-5), torch.cat(alone))
