"""Cases of the norms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable

_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class NormCase(Case):
    """x [*shape]; `magnitude` of its entries, where small ones let eps matter; the first row is zero.

    `passed` columns are not normed.
    """

    shape: tuple[int, ...]
    magnitude: float = 1.0
    passed: int = 0


_FLOAT32 = (
    NormCase(name="one row", shape=(2, 128)),
    NormCase(name="heads", shape=(5, 3, 96)),
    NormCase(name="narrow", shape=(33, 16)),
    NormCase(name="hidden size of K3", shape=(2, 7168)),
    NormCase(name="eps matters", shape=(7, 160), magnitude=3e-3),
    NormCase(name="large", shape=(7, 160), magnitude=1e4),
)
CASES = (*_FLOAT32, *(case.in_bfloat16() for case in _FLOAT32))


PASSING_CASES = (
    NormCase(name="latent and shared key part", shape=(3, 160), passed=32),
    NormCase(name="odd rest", shape=(9, 61), passed=13),
)
RMS_CASES = (*CASES, *PASSING_CASES, *(case.in_bfloat16() for case in PASSING_CASES))


def rms_norm_arguments(case: NormCase, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """x and weight in one dtype."""
    return _x(case, generator), _weight(case, generator).to(case.dtype), _EPS


def gated_rms_norm_arguments(case: NormCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, float]:
    """The gate's logits reach far into both tails."""
    gate = 10 * torch.randn(case.shape, generator=generator)
    return _x(case, generator), _weight(case, generator), gate.to(case.dtype), _EPS


def layer_norm_arguments(case: NormCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, float]:
    """x is off centre."""
    weight, bias = (_weight(case, generator).to(case.dtype) for _ in range(2))
    return _x(case, generator) + case.magnitude, weight, bias, _EPS


def _x(case: NormCase, generator: torch.Generator) -> Tensor:
    x = case.magnitude * torch.randn(case.shape, generator=generator)
    x[0] = 0.0
    return x.to(case.dtype)


def _weight(case: NormCase, generator: torch.Generator) -> Tensor:
    return 1 + 0.5 * torch.randn(case.shape[-1] - case.passed, generator=generator)


TABLES = {
    "rms_norm": CaseTable(RMS_CASES, rms_norm_arguments),
    "gated_rms_norm": CaseTable(CASES, gated_rms_norm_arguments),
    "layer_norm": CaseTable(CASES, layer_norm_arguments),
}
