"""A token's products are the same to the bit alone and among others, for every weight and both kinds of activations."""

import pytest
import torch

from perilune.ops._native import MXFP4_CODE, TYPE_CODES, address, core

NUM_TOKENS = 64
pytestmark = pytest.mark.usefixtures("isa", "num_threads")

WEIGHTS = {
    "float32": (lambda size: torch.randn(size), TYPE_CODES[torch.float32]),
    "bfloat16": (lambda size: torch.randn(size).bfloat16(), TYPE_CODES[torch.bfloat16]),
    "int8": (lambda size: torch.randint(-127, 128, size, dtype=torch.int8), TYPE_CODES[torch.int8]),
    "fp8": (lambda size: torch.randn(size).to(torch.float8_e4m3fn), TYPE_CODES[torch.float8_e4m3fn]),
    "mxfp4": (lambda size: torch.randint(256, (size[0], size[1] // 2), dtype=torch.uint8), MXFP4_CODE),
}


def products(x, weight, scales, size, code, int8_activations):
    y = x.new_empty(len(x), size[0])
    given = (address(weight), address(scales), *size, code)
    core().linear(address(x), TYPE_CODES[x.dtype], len(x), [given], [address(y)], int8_activations)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(80, 96), (33, 7168), (16, 544)])
@pytest.mark.parametrize(
    ("kind", "int8_activations"),
    [*((kind, False) for kind in WEIGHTS), ("int8", True), ("mxfp4", True)],
)
def test_a_token_alone_is_multiplied_as_among_others(kind, int8_activations, size, dtype):
    torch.manual_seed(0)
    make, code = WEIGHTS[kind]
    weight = make(size)
    scales = torch.rand(size[0])
    if kind == "mxfp4":
        scales = torch.randint(118, 122, (size[0], size[1] // 32), dtype=torch.uint8)
    x = torch.randn(NUM_TOKENS, size[1]).to(dtype)
    together = products(x, weight, scales, size, code, int8_activations)
    assert torch.isfinite(together).all()
    for count in (1, 2, 3, 4, 5, 7):
        few = x[-count:].contiguous()
        assert torch.equal(products(few, weight, scales, size, code, int8_activations), together[-count:])
