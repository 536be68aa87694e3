"""Bench cases of the ops that work on rows of activations: norms, residual mix, SiTU, GELU."""

from collections.abc import Callable, Iterator

import torch

from perilune.bench.case import HEADS, HIDDEN, TOKENS, WIDTH, BenchCase, Builder
from perilune.bench.ceilings import Work
from perilune.ops.attn_res import cases as attn_res
from perilune.ops.case import tensors_in
from perilune.ops.moe import cases as moe
from perilune.ops.norm import cases as norm
from perilune.ops.packed_rows import cases as packed_rows
from perilune.ops.packed_rows.layout import EIGHT_BIT
from perilune.ops.rows import cases as rows
from perilune.ops.vision import cases as vision

_SHARED_INNER = 6144
_CANDIDATES = 8
_TOWER_INNER = 4096
_PATCHES = (1024, 4096)


def _cached(op: str, name: str, arguments: tuple[object, ...]) -> BenchCase:
    size = sum(tensor.nbytes for tensor in tensors_in(arguments))
    return BenchCase(op, name, (arguments,), Work(size, 0), is_cached=True)


def rms_norm(generator: torch.Generator) -> Iterator[BenchCase]:
    for tokens in TOKENS:
        case = norm.NormCase(name="", shape=(tokens, HIDDEN)).in_bfloat16()
        yield _cached("rms_norm", f"{tokens} tokens", norm.rms_norm_arguments(case, generator))


def gated_rms_norm(generator: torch.Generator) -> Iterator[BenchCase]:
    for tokens in TOKENS:
        case = norm.NormCase(name="", shape=(tokens, HEADS, WIDTH)).in_bfloat16()
        yield _cached("gated_rms_norm", f"{tokens} tokens", norm.gated_rms_norm_arguments(case, generator))


def layer_norm(generator: torch.Generator) -> Iterator[BenchCase]:
    """The index key."""
    for tokens in TOKENS:
        case = norm.NormCase(name="", shape=(tokens, WIDTH)).in_bfloat16()
        yield _cached("layer_norm", f"{tokens} tokens", norm.layer_norm_arguments(case, generator))


def attn_res_mix(generator: torch.Generator) -> Iterator[BenchCase]:
    """A full bank."""
    for tokens in TOKENS:
        case = attn_res.MixCase(name="", rows=tokens, width=HIDDEN, num_candidates=_CANDIDATES).in_bfloat16()
        name = f"{_CANDIDATES} candidates, {tokens} tokens"
        yield _cached("attn_res_mix", name, attn_res.arguments(case, generator))


def situ(generator: torch.Generator) -> Iterator[BenchCase]:
    """Between the shared experts' matrices."""
    for tokens in TOKENS:
        case = moe.SituCase(name="", shape=(tokens, _SHARED_INNER)).in_bfloat16()
        yield _cached("situ", f"{tokens} tokens", moe.situ_arguments(case, generator))


def gelu_tanh(generator: torch.Generator) -> Iterator[BenchCase]:
    """Between the matrices of the vision tower."""
    for patches in _PATCHES:
        case = vision.GeluCase(name="", shape=(patches, _TOWER_INNER)).in_bfloat16()
        yield _cached("gelu_tanh", f"{patches} patches", vision.gelu_arguments(case, generator))


def _rows(op: str, arguments: Callable[[rows.RowCase, torch.Generator], tuple[object, ...]]) -> Builder:
    """Rows of the hidden size."""

    def build(generator: torch.Generator) -> Iterator[BenchCase]:
        for tokens in TOKENS:
            case = rows.RowCase(name="", rows=tokens, width=HIDDEN).in_bfloat16()
            yield _cached(op, f"{tokens} tokens", arguments(case, generator))

    return build


def append_rows(generator: torch.Generator) -> Iterator[BenchCase]:
    """Rows of the hidden size, of steps of answers, into a pool with room for as many calls as are timed."""
    for tokens in (1, 4):
        case = rows.RowCase(name="", rows=tokens, width=HIDDEN).in_bfloat16()
        _, end, x = rows.append_rows_arguments(case, generator)
        pool = torch.zeros(1024 * tokens, HIDDEN, dtype=x.dtype)
        yield BenchCase("append_rows", f"{tokens} tokens", ((pool, end, x),), Work(2 * x.nbytes, 0), is_cached=True)


def store_packed_rows(generator: torch.Generator) -> Iterator[BenchCase]:
    """Latent rows of a step."""
    for tokens in (1, 64, 512):
        for values in EIGHT_BIT:
            case = packed_rows.PackedCase(name="", values=values, num_rows=tokens, num_scaled=512, num_further=64)
            name = f"{tokens} tokens, {str(values).removeprefix('torch.')}"
            yield _cached("store_packed_rows", name, packed_rows.arguments(case.in_bfloat16(), generator))


BUILDERS: dict[str, Builder] = {
    "rms_norm": rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "gelu_tanh": gelu_tanh,
    "layer_norm": layer_norm,
    "attn_res_mix": attn_res_mix,
    "situ": situ,
    "embed_rows": _rows("embed_rows", rows.embed_rows_arguments),
    "store_packed_rows": store_packed_rows,
    "store_rows": _rows("store_rows", rows.store_rows_arguments),
    "append_rows": append_rows,
    "join_rows": _rows("join_rows", rows.join_rows_arguments),
    "add_rows": _rows("add_rows", rows.pair_arguments),
    "gate_rows": _rows("gate_rows", rows.pair_arguments),
    "swiglu": _rows("swiglu", rows.pair_arguments),
    "scale_rows": _rows("scale_rows", rows.scale_rows_arguments),
}
