"""Cases of sampling: every one is exact, as a token is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.ops.case import Case, CaseTable, Tolerance
from perilune.ops.sampling.reference import NUM_SETTINGS

_EXACT = Tolerance(0.0, "a token is chosen or not")
_TEMPERATURES = (0.0, 0.7, 1.0, 3.0, 1e-9, 1e30)
_TOP_KS = (0, 1, 7, 50, 10**6)
_TOP_PS = (1.0, 0.9, 0.5, 1e-9)
_MIN_PS = (0.0, 0.05, 1.0)


@dataclass(frozen=True, kw_only=True)
class SampleCase(Case):
    """`rows` of `vocab` logits, of which each draws with other settings; few `levels` make many equal ones."""

    rows: int
    vocab: int
    levels: int = 0
    scale: float = 3.0
    is_masked: bool = False
    is_filtered: bool = True
    tolerance: Tolerance = _EXACT


_FLOAT32 = (
    SampleCase(name="a vocabulary of one", rows=2, vocab=1),
    SampleCase(name="small", rows=64, vocab=37),
    SampleCase(name="masked", rows=64, vocab=1031, is_masked=True),
    SampleCase(name="equal logits", rows=48, vocab=517, levels=3, is_masked=True),
    SampleCase(name="all equal", rows=16, vocab=4096, levels=1),
    SampleCase(name="flat", rows=16, vocab=5000, scale=0.01),
    SampleCase(name="peaked", rows=16, vocab=5000, scale=60.0),
    SampleCase(name="vocabulary of K3", rows=3, vocab=163840, is_masked=True),
    SampleCase(name="not finite", rows=5, vocab=100, scale=torch.inf),
)
CASES = (*_FLOAT32, *(case.in_bfloat16(tolerance=_EXACT) for case in _FLOAT32))


def sample_arguments(case: SampleCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """Settings of all kinds; about half of a masked row's tokens are allowed."""
    logits = _logits(case, generator).to(case.dtype)
    settings = torch.zeros(case.rows, NUM_SETTINGS, dtype=torch.float64)
    for column, choices in enumerate((_TEMPERATURES, _TOP_KS, _TOP_PS, _MIN_PS)):
        chosen = torch.randint(0, len(choices), (case.rows,), generator=generator)
        settings[:, column] = torch.tensor(choices, dtype=torch.float64)[chosen]
    if not case.is_filtered:
        settings[:, 1:4] = torch.tensor([0.0, 1.0, 0.0])
    settings[:, 4] = torch.rand(case.rows, generator=generator, dtype=torch.float64)
    settings[-1, 4] = 1 - 2.0**-53
    if not case.is_masked:
        return logits, settings, None
    words = -(-case.vocab // 32)
    mask = torch.randint(-(2**31), 2**31, (case.rows, words), generator=generator).int()
    mask[0] = -1
    return logits, settings, mask


def _logits(case: SampleCase, generator: torch.Generator) -> Tensor:
    shape = (case.rows, case.vocab)
    if case.levels:
        return torch.randint(0, case.levels, shape, generator=generator).float()
    if case.scale < torch.inf:
        return case.scale * torch.randn(shape, generator=generator)
    logits = torch.randn(shape, generator=generator)
    logits[0, 3], logits[1], logits[2, -1], logits[3, 0] = torch.nan, -torch.inf, torch.inf, torch.nan
    logits[3, 1] = torch.inf
    return logits


@dataclass(frozen=True, kw_only=True)
class PenaltyCase(Case):
    """Tokens of a prompt and an output, among them repeated ones."""

    vocab: int
    num_prompt: int
    num_output: int
    penalties: tuple[float, float, float]
    tolerance: Tolerance = _EXACT


PENALTY_CASES = (
    PenaltyCase(name="repetition", vocab=37, num_prompt=9, num_output=5, penalties=(1.3, 0.0, 0.0)),
    PenaltyCase(name="all", vocab=517, num_prompt=60, num_output=300, penalties=(0.7, 0.3, -0.7)),
    PenaltyCase(name="nothing yet", vocab=37, num_prompt=3, num_output=0, penalties=(1.0, 0.3, 1.0)),
    PenaltyCase(name="no tokens", vocab=37, num_prompt=0, num_output=0, penalties=(1.1, 0.3, 1.0)),
    PenaltyCase(name="vocabulary of K3", vocab=163840, num_prompt=4000, num_output=3000, penalties=(1.1, 0.1, 0.2)),
)


def penalty_arguments(case: PenaltyCase, generator: torch.Generator) -> tuple[Tensor, Tensor, int, float, float, float]:
    """Logits of both signs."""
    logits = 3 * torch.randn(case.vocab, generator=generator)
    ids = torch.randint(0, case.vocab, (case.num_prompt + case.num_output,), generator=generator)
    ids[case.num_prompt :] //= 3
    return logits, ids, case.num_prompt, *case.penalties


TABLES: dict[str, CaseTable[Any]] = {
    "sample_masses": CaseTable(CASES, sample_arguments),
    "sample_tokens": CaseTable(CASES, sample_arguments),
    "penalize": CaseTable(PENALTY_CASES, penalty_arguments),
}
