"""Bench cases of the ops that read weights: linear maps, router, experts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.bench.case import (
    BFLOAT16_BYTES,
    HIDDEN,
    INNER,
    LATENT,
    NUM_CHOSEN,
    NUM_EXPERTS,
    TOKENS,
    BenchCase,
    Builder,
    rotated,
)
from perilune.bench.ceilings import Products, Work
from perilune.ops.linear.weights import ChannelScaled, LinearWeight, WeightGroup, stored
from perilune.ops.moe.expert_table import DenseExpert, ExpertTable, PackedExpert
from perilune.ops.mxfp4.cases import packed_weight

_PROJECTION = 12288  # heads * width
_BETA, _LINEAR_BETA = 4.0, 25.0
_SCALES = (118, 122)
# tokens of the grouped pass in which every expert gets all rows
_ROWS_PER_EXPERT = (4, 9, 16, 64, 512)


def activations(tokens: int, columns: int, generator: torch.Generator) -> Tensor:
    """x [tokens, columns] bfloat16."""
    return torch.randn(tokens, columns, generator=generator).to(torch.bfloat16)


def bfloat16_weight(outputs: int, columns: int, generator: torch.Generator) -> Tensor:
    """[outputs, columns]; repeats a block of random numbers, as drawing a hundred million takes seconds."""
    block = (torch.randn(64, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)
    return block.repeat(-(-outputs // 64), 1)[:outputs].contiguous()


def scaled_weight(outputs: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> ChannelScaled:
    """[outputs, columns] in int8 or float8_e4m3fn with a scale per output."""
    if dtype is torch.int8:
        values = torch.randint(-127, 128, (64, columns), generator=generator, dtype=dtype)
    else:
        values = torch.randn(64, columns, generator=generator).to(dtype)
    values = values.repeat(-(-outputs // 64), 1)[:outputs].contiguous()
    return ChannelScaled(values, torch.full((outputs,), columns**-0.5 / 64))


def _linear_work(tokens: int, weights: list[LinearWeight], products: Products) -> Work:
    entries = sum(stored(weight).numel() for weight in weights)
    size = sum(stored(weight).nbytes for weight in weights)
    return Work(size + tokens * stored(weights[0]).shape[1] * BFLOAT16_BYTES, 2 * tokens * entries, products)


def dense_linear(generator: torch.Generator) -> Iterator[BenchCase]:
    """The output projection of a mixer in every storage, and the latent down-projection."""
    kinds: list[tuple[str, LinearWeight, bool]] = [
        ("bf16", bfloat16_weight(HIDDEN, _PROJECTION, generator), False),
        ("fp8", scaled_weight(HIDDEN, _PROJECTION, torch.float8_e4m3fn, generator), False),
        ("int8", scaled_weight(HIDDEN, _PROJECTION, torch.int8, generator), False),
    ]
    kinds.append(("int8, int8 activations", kinds[-1][1], True))
    kinds.append(("bf16", bfloat16_weight(LATENT, HIDDEN, generator), False))
    for kind, weight, is_int8 in kinds:
        weights = rotated(weight)
        outputs, columns = stored(weight).shape
        for tokens in TOKENS:
            x = activations(tokens, columns, generator)
            yield BenchCase(
                "dense_linear",
                f"{outputs} x {columns} {kind}, {tokens} tokens",
                tuple((x, weight, is_int8) for weight in weights),
                _linear_work(tokens, [weight], "int8" if is_int8 else "bfloat16"),
            )


def linear_group(generator: torch.Generator) -> Iterator[BenchCase]:
    """The projections that a KDA layer makes of its input: q, k, v, gate, decay, beta."""
    rows = (_PROJECTION,) * 4 + (128, 96)
    for kind, is_int8 in (("bf16", False), ("int8", False), ("int8, int8 activations", True)):
        if kind == "bf16":
            weights: list[LinearWeight] = [bfloat16_weight(outputs, HIDDEN, generator) for outputs in rows]
        else:
            weights = [scaled_weight(outputs, HIDDEN, torch.int8, generator) for outputs in rows]
        group = WeightGroup(*weights)
        for tokens in (1, 4, 16):
            yield BenchCase(
                "linear_group",
                f"KDA inputs {kind}, {tokens} tokens",
                ((activations(tokens, HIDDEN, generator), group, is_int8),),
                _linear_work(tokens, weights, "int8" if is_int8 else "bfloat16"),
            )


def quantize_rows(generator: torch.Generator) -> Iterator[BenchCase]:
    """What loading does to a projection; the result is written as well, which the bound leaves out."""
    weight = bfloat16_weight(HIDDEN, _PROJECTION, generator)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        name = f"{HIDDEN} x {_PROJECTION} to {str(dtype).removeprefix('torch.')}"
        into = ChannelScaled(torch.empty(weight.shape, dtype=dtype), torch.empty(HIDDEN))
        arguments = tuple((own, into) for own in rotated(weight))
        yield BenchCase("quantize_rows", name, arguments, Work(weight.nbytes, 0))


def mxfp4_linear(generator: torch.Generator) -> Iterator[BenchCase]:
    """One expert matrix."""
    weights = rotated(packed_weight(INNER, LATENT, _SCALES, generator))
    size = sum(tensor.nbytes for tensor in weights[0])
    for tokens in TOKENS:
        x = activations(tokens, LATENT, generator)
        work = Work(size + x.nbytes, 2 * tokens * INNER * LATENT)
        arguments = tuple((x, *weight) for weight in weights)
        yield BenchCase("mxfp4_linear", f"{INNER} x {LATENT}, {tokens} tokens", arguments, work)


def moe_route(generator: torch.Generator) -> Iterator[BenchCase]:
    """The router over all 896 experts; its products are float32."""
    weights = rotated(bfloat16_weight(896, HIDDEN, generator))
    bias = torch.zeros(896)
    for tokens in TOKENS:
        x = activations(tokens, HIDDEN, generator)
        work = Work(weights[0].nbytes + x.nbytes, 2 * tokens * weights[0].numel(), "float32")
        arguments = tuple((x, weight, bias, NUM_CHOSEN, True, 1.0) for weight in weights)
        yield BenchCase("moe_route", f"896 experts, {tokens} tokens", arguments, work)


def _experts_case(
    op: str,
    name: str,
    experts: ExpertTable[PackedExpert] | ExpertTable[DenseExpert],
    tokens: int,
    num_chosen: int,
    flags: tuple[bool, ...],
    generator: torch.Generator,
) -> BenchCase:
    """Four calls with other choices each, so that few tokens do not meet the same experts."""
    num_experts, inner, latent = experts.shape
    x = activations(tokens, latent, generator)
    expert_bytes = sum(tensor.nbytes for tensor in experts[0])
    arguments, met = [], []
    for _ in range(4):
        ids = torch.stack([torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(tokens)])
        weights = torch.rand(tokens, num_chosen, generator=generator).softmax(-1)
        arguments.append((x, ids, weights, experts, _BETA, _LINEAR_BETA, *flags))
        met.append(len(ids.unique()))
    work = Work(
        sum(met) / len(met) * expert_bytes + x.nbytes,
        2 * tokens * num_chosen * 3 * inner * latent,
        "int8" if any(flags) else "bfloat16",
    )
    return BenchCase(op, name, tuple(arguments), work)


def moe_experts_mxfp4(generator: torch.Generator) -> Iterator[BenchCase]:
    """48 experts of K3 as a model uses them, then eight that all get every row."""
    packed = []
    for _ in range(NUM_EXPERTS):
        w1, w3 = (packed_weight(INNER, LATENT, _SCALES, generator) for _ in range(2))
        packed.append(PackedExpert(*w1, *w3, *packed_weight(LATENT, INNER, _SCALES, generator)))
    many, few = ExpertTable(packed), ExpertTable(packed[:8])
    for kind, is_int8 in (("", False), (", int8 activations", True)):
        for tokens in TOKENS:
            name = f"top {NUM_CHOSEN} of {NUM_EXPERTS}, {tokens} tokens{kind}"
            yield _experts_case("moe_experts_mxfp4", name, many, tokens, NUM_CHOSEN, (is_int8,), generator)
        for rows in _ROWS_PER_EXPERT:
            name = f"{rows} rows for each of 8{kind}"
            yield _experts_case("moe_experts_mxfp4", name, few, rows, len(few), (is_int8,), generator)


def moe_experts(generator: torch.Generator) -> Iterator[BenchCase]:
    """The same experts unpacked; only as many as fit beside everything else."""
    first, second = bfloat16_weight(INNER, LATENT, generator), bfloat16_weight(LATENT, INNER, generator)
    dense = ExpertTable(DenseExpert(first.clone(), first.clone(), second.clone()) for _ in range(6))
    for tokens in (1, 16):
        name = f"top 2 of 6 bf16, {tokens} tokens"
        yield _experts_case("moe_experts", name, dense, tokens, 2, (), generator)


BUILDERS: dict[str, Builder] = {
    "dense_linear": dense_linear,
    "linear_group": linear_group,
    "quantize_rows": quantize_rows,
    "mxfp4_linear": mxfp4_linear,
    "moe_route": moe_route,
    "moe_experts_mxfp4": moe_experts_mxfp4,
    "moe_experts": moe_experts,
}
