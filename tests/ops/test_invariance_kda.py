"""KDA and norms: a sequence, or a row, gives the same to the bit alone and among others."""

import pytest
import torch

from perilune import ops
from perilune.ops.case import Layout
from perilune.ops.conv import cases as conv
from perilune.ops.kda import cases as kda
from tests.ops.calls import copied

pytestmark = pytest.mark.usefixtures("isa", "num_threads")

SINGLE = (1,) * 20
# 64 tokens; borders of chunks and of the tiles within them, single tokens in front and between
MANY = Layout((*SINGLE, 16, 17, 1, 4, 2, 3, 1), (*range(20), 5, 0, 3, 1, 0, 7, 2))
DTYPES = [torch.float32, torch.bfloat16]
# first, how many arguments have a row per token; then, which are states
SHAPES = {"short_conv": (1, (2,)), "kda_recurrent": (5, (6,)), "kda_chunk": (5, (6,)), "kda_mix": (6, (15, 16))}


def arguments(op_name, dtype, width):
    generator = torch.Generator().manual_seed(0)
    if op_name == "short_conv":
        case = conv.ConvCase(name="", layout=MANY, channels=3 * width, dtype=dtype)
        return conv.arguments(case, generator)
    if op_name == "kda_mix":
        return kda.mix_arguments(kda.MixCase(name="", layout=MANY, heads=3, width=width, dtype=dtype), generator)
    return kda.attention_arguments(
        kda.AttentionCase(name="", layout=MANY, heads=3, width=width, dtype=dtype), generator
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op_name", SHAPES)
@pytest.mark.parametrize("width", [48, 128])
def test_a_sequence_alone_is_as_among_others(op_name, dtype, width):
    """Results, and the states that remain."""
    rows, states = SHAPES[op_name]
    given = arguments(op_name, dtype, width)
    beside, alone = copied(given), copied(given)
    op = getattr(ops, op_name)
    together = op(*beside)
    slots, ends = given[-2:]
    for n, length in enumerate(MANY.new):
        own = slice(int(ends[n]), int(ends[n + 1]))
        rest = (*alone[rows:-2], slots[n : n + 1], torch.tensor([0, length]))
        assert torch.equal(op(*(x[own] for x in alone[:rows]), *rest), together[own]), f"sequence {n}"
    for index in states:
        assert torch.equal(alone[index].nan_to_num(), beside[index].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_one_by_one_are_the_recurrence_in_one(dtype):
    case = kda.AttentionCase(name="", layout=Layout((9,), (4,)), heads=2, width=128, dtype=dtype)
    q, k, v, g, beta, l2_eps, state, slots, ends = kda.attention_arguments(case, torch.Generator().manual_seed(0))
    whole, one_by_one = state.clone(), state.clone()
    together = ops.kda_recurrent(q, k, v, g, beta, l2_eps, whole, slots, ends)
    for t in range(9):
        own = [x[t : t + 1] for x in (q, k, v, g, beta)]
        alone = ops.kda_recurrent(*own, l2_eps, one_by_one, slots, torch.tensor([0, 1]))
        assert torch.equal(alone, together[t : t + 1])
    assert torch.equal(whole[slots], one_by_one[slots])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 128, 7168, 100])
def test_a_row_is_normed_alone_as_among_others(dtype, columns):
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(64, columns, generator=generator).to(dtype) for _ in range(2))
    weight, bias = torch.randn(2, columns, generator=generator)
    calls = [
        lambda own: ops.rms_norm(x[own], weight.to(dtype), 1e-5),
        lambda own: ops.gated_rms_norm(x[own], weight, gate[own], 1e-5),
        lambda own: ops.layer_norm(x[own], weight, bias, 1e-5),
    ]
    for norm in calls:
        together = norm(slice(0, 64))
        assert torch.equal(torch.cat([norm(slice(row, row + 1)) for row in range(64)]), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_decay_is_its_own(dtype):
    case = kda.DecayCase(name="", rows=64, heads=3, width=48, dtype=dtype)
    z, *rest = kda.decay_arguments(case, torch.Generator().manual_seed(0))
    together = ops.kda_decay(z, *rest)
    assert torch.equal(torch.cat([ops.kda_decay(z[t : t + 1], *rest) for t in range(64)]), together)
