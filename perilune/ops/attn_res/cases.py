"""Cases of the attention-residual mix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable, Tolerance

_SHARP = Tolerance(1e-4, "a score near 100 carries a rounding of 1e-5, and weights are exponentials of scores")


@dataclass(frozen=True, kw_only=True)
class MixCase(Case):
    """`num_candidates` tensors [rows, width]; `sharpness` scales the scores, from near equal to one winner."""

    rows: int
    width: int
    num_candidates: int
    sharpness: float = 1.0


_FLOAT32 = (
    MixCase(name="one candidate", rows=3, width=96, num_candidates=1),
    MixCase(name="one row", rows=1, width=160, num_candidates=2),
    MixCase(name="full bank of K3", rows=5, width=7168, num_candidates=9),
    MixCase(name="near equal scores", rows=33, width=32, num_candidates=4, sharpness=1e-3),
    MixCase(name="one winner", rows=7, width=48, num_candidates=5, sharpness=30.0, tolerance=_SHARP),
)
CASES = (*_FLOAT32, *(case.in_bfloat16() for case in _FLOAT32))


def arguments(case: MixCase, generator: torch.Generator) -> tuple[list[Tensor], Tensor, Tensor, float]:
    """Candidates differ in magnitude as a residual stream's do; one has a zero row."""
    candidates = [
        (4.0**-index * torch.randn(case.rows, case.width, generator=generator)).to(case.dtype)
        for index in range(case.num_candidates)
    ]
    candidates[-1][0] = 0.0
    query = case.sharpness * torch.randn(case.width, generator=generator) * case.width**-0.5
    norm_weight = 1 + 0.5 * torch.randn(case.width, generator=generator)
    return candidates, query, norm_weight.to(case.dtype), 1e-5


TABLES = {"attn_res_mix": CaseTable(CASES, arguments)}
