"""Cases of rotary positions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.ops.case import LAYOUTS, Case, CaseTable, Layout


@dataclass(frozen=True, kw_only=True)
class TurnsCase(Case):
    """`pairs` pairs of channels over the sequences of `layout`."""

    layout: Layout
    pairs: int = 16
    factor: float = 1.2


@dataclass(frozen=True, kw_only=True)
class RotateCase(Case):
    """`tokens` rows of `heads` heads (0: no such dim) of `width`, the last `turned` of which turn."""

    tokens: int
    heads: int
    width: int
    turned: int
    is_interleaved: bool = True


TURNS_CASES = (
    *(TurnsCase(name=name, layout=layout) for name, layout in LAYOUTS.items()),
    TurnsCase(name="a million positions", layout=Layout((3, 1), (1048570, 524287)), pairs=32),
)
_ROTATE = (
    RotateCase(name="a shared key", tokens=5, heads=0, width=64, turned=16),
    RotateCase(name="queries", tokens=7, heads=3, width=96, turned=32),
    RotateCase(name="whole heads in halves", tokens=4, heads=2, width=64, turned=64, is_interleaved=False),
    RotateCase(name="halves of a part", tokens=1, heads=5, width=48, turned=32, is_interleaved=False),
    RotateCase(name="heads of K3", tokens=2, heads=96, width=192, turned=64),
)
ROTATE_CASES = (*_ROTATE, *(case.in_bfloat16() for case in _ROTATE))


def turns_arguments(case: TurnsCase, generator: torch.Generator) -> tuple[Tensor, float, Tensor, Tensor, int]:
    """Frequencies from 1 down to 1e-5."""
    frequencies = torch.logspace(0, -5, case.pairs, dtype=torch.float64)
    return frequencies, case.factor, case.layout.seq_lens, case.layout.cu_seqlens, case.layout.num_tokens


def rotate_arguments(case: RotateCase, generator: torch.Generator) -> tuple[Tensor, Tensor, bool]:
    """Any turns will do."""
    shape = (case.tokens, case.heads, case.width) if case.heads else (case.tokens, case.width)
    angles = 6 * torch.rand(case.tokens, case.turned // 2, generator=generator)
    turns = 1.1 * torch.cat((angles.cos(), angles.sin()), dim=-1)
    return torch.randn(shape, generator=generator).to(case.dtype), turns, case.is_interleaved


TABLES: dict[str, CaseTable[Any]] = {
    "rotary_turns": CaseTable(TURNS_CASES, turns_arguments),
    "rotate": CaseTable(ROTATE_CASES, rotate_arguments),
}
