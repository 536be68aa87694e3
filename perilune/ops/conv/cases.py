"""Cases of the short convolution."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.case import LAYOUTS, Case, CaseTable, Layout, scattered_slots


@dataclass(frozen=True, kw_only=True)
class ConvCase(Case):
    """`channels` channels and `taps` taps over the sequences of `layout`; without a state nothing is kept."""

    layout: Layout
    channels: int
    taps: int = 4
    has_state: bool = True


_FLOAT32 = (
    *(ConvCase(name=name, layout=layout, channels=48) for name, layout in LAYOUTS.items()),
    ConvCase(name="no state", layout=LAYOUTS["lengths differ"], channels=80, has_state=False),
    ConvCase(name="shorter than the taps", layout=Layout((1, 2, 3), (0, 1, 2)), channels=16),
    ConvCase(name="two taps", layout=LAYOUTS["lengths differ"], channels=16, taps=2),
    ConvCase(name="two heads of K3", layout=LAYOUTS["decode and long"], channels=3 * 2 * 128),
)
CASES = (*_FLOAT32, *(case.in_bfloat16() for case in _FLOAT32))


def arguments(case: ConvCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """States of other sequences hold NaN; a sequence that begins has a zero one."""
    x = torch.randn(case.layout.num_tokens, case.channels, generator=generator).to(case.dtype)
    weight = torch.randn(case.channels, case.taps, generator=generator) * case.taps**-0.5
    num_slots, state_slots = scattered_slots(len(case.layout.new), generator)
    if not case.has_state:
        return x, weight, None, state_slots, case.layout.cu_seqlens
    state = torch.full((num_slots, case.taps - 1, case.channels), torch.nan, dtype=case.dtype)
    for slot, before in zip(state_slots.tolist(), case.layout.before, strict=True):
        context = torch.randn(case.taps - 1, case.channels, generator=generator)
        context[: max(0, case.taps - 1 - before)] = 0.0
        state[slot] = context.to(case.dtype)
    return x, weight, state, state_slots, case.layout.cu_seqlens


TABLES = {"short_conv": CaseTable(CASES, arguments)}
