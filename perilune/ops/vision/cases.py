"""Cases of the vision tower's ops."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable, Tolerance

_ROUNDED = Tolerance(4e-2, "turned queries and keys are rounded to bfloat16 before they meet")


@dataclass(frozen=True, kw_only=True)
class PatchCase(Case):
    """Pictures of so many patches each, packed into one call; `queries` first to end - 1, None for all."""

    patches: tuple[int, ...]
    heads: int = 3
    width: int = 32
    queries: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class GeluCase(Case):
    """x of `shape`."""

    shape: tuple[int, ...]


# keys go in blocks of 96, queries in vectors and in groups of 96
_FLOAT32 = (
    PatchCase(name="one patch", patches=(1,)),
    PatchCase(name="smallest picture", patches=(4,)),
    PatchCase(name="pictures of different sizes", patches=(4, 96, 12, 97)),
    PatchCase(name="more patches than a block", patches=(300,), heads=2),
    PatchCase(name="narrow heads", patches=(24, 8), heads=5, width=16),
    PatchCase(name="two heads of K3", patches=(36, 4), heads=2, width=128),
    PatchCase(name="a range of queries", patches=(4, 96, 12, 97), queries=(50, 130)),
    PatchCase(name="queries of one picture", patches=(40, 60), queries=(45, 46)),
    PatchCase(name="several groups of queries", patches=(420, 4), heads=1, width=16),
)
CASES = (*_FLOAT32, *(case.in_bfloat16(_ROUNDED) for case in _FLOAT32))
_GELU_SHAPES = {"row": (1, 128), "odd": (3, 37), "long": (9, 4096)}
_GELU = tuple(GeluCase(name=name, shape=shape) for name, shape in _GELU_SHAPES.items())
GELU_CASES = (*_GELU, *(case.in_bfloat16() for case in _GELU))


def arguments(case: PatchCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, slice]:
    """Scores spread wide enough for some sharp softmaxes."""
    total = sum(case.patches)
    qkv = 1.2 * torch.randn(total, 3, case.heads, case.width, generator=generator)
    angles = 20 * torch.rand(total, case.width // 2, generator=generator)
    cu_seqlens = torch.tensor([0, *case.patches]).cumsum(0)
    return qkv.to(case.dtype), angles.cos(), angles.sin(), cu_seqlens, slice(*(case.queries or (None,)))


def gelu_arguments(case: GeluCase, generator: torch.Generator) -> tuple[Tensor]:
    """Values that reach far into both tails."""
    return ((4 * torch.randn(case.shape, generator=generator)).to(case.dtype),)


TABLES: dict[str, CaseTable[Any]] = {
    "patch_attention": CaseTable(CASES, arguments),
    "gelu_tanh": CaseTable(GELU_CASES, gelu_arguments),
}
