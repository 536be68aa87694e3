"""A token's mix is the same to the bit alone and among others, by any number of threads."""

import pytest
import torch

from perilune import ops
from perilune.ops import _native
from tests.ops.test_native import ISAS, isa  # noqa: F401

NUM_TOKENS = 64


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_candidates", "width"), [(1, 96), (4, 48), (9, 1040)])
def test_a_token_alone_equals_itself_among_others(num_candidates, width, dtype, isa):  # noqa: F811
    generator = torch.Generator().manual_seed(0)
    candidates = [torch.randn(NUM_TOKENS, width, generator=generator).to(dtype) for _ in range(num_candidates)]
    query, weight = torch.randn(width, generator=generator), torch.randn(width, generator=generator).to(dtype)
    before = _native.core().num_threads()
    try:
        _native.core().set_num_threads(1)
        alone = torch.cat(
            [ops.attn_res_mix([rows[i : i + 1] for rows in candidates], query, weight, 1e-5) for i in range(NUM_TOKENS)]
        )
        for num_threads in (1, 2):
            _native.core().set_num_threads(num_threads)
            assert torch.equal(ops.attn_res_mix(candidates, query, weight, 1e-5), alone)
    finally:
        _native.core().set_num_threads(before)
