"""Cases of KDA: the decay, the recurrence in both forms, and all of a layer between its projections."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.ops.case import LAYOUTS, Case, CaseTable, Layout, Tolerance, scattered_slots
from perilune.ops.kda.replay import KdaRecords

_L2_EPS = 1e-6
_NORM_EPS = 1e-5
_LOWER_BOUND = -5.0
# exp(G) of a log decay near -40 carries the rounding of G itself, 2^-19, into its result.
_DECAYING = Tolerance(1e-4, "chunks form exponentials of float32 log decays whose sums reach -80")


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """`heads` heads of `width` over the sequences of `layout`; g and beta are uniform in `decay` and `beta`."""

    layout: Layout
    heads: int
    width: int
    decay: tuple[float, float] = (-2.0, 0.0)
    beta: tuple[float, float] = (0.0, 1.0)
    has_state: bool = True


@dataclass(frozen=True, kw_only=True)
class DecayCase(Case):
    """z [rows, heads, width] of `magnitude`; large ones saturate the sigmoid on both sides."""

    rows: int
    heads: int
    width: int
    magnitude: float = 1.0


_MIXED, _LONG = LAYOUTS["lengths differ"], LAYOUTS["decode and long"]
_FLOAT32 = (
    *(AttentionCase(name=name, layout=layout, heads=3, width=16) for name, layout in LAYOUTS.items()),
    AttentionCase(name="whole chunks", layout=Layout((32, 32), (0, 32)), heads=2, width=16),
    AttentionCase(name="one chunk and a row", layout=Layout((17,), (16,)), heads=2, width=16),
    AttentionCase(name="no state", layout=_MIXED, heads=2, width=48, has_state=False),
    AttentionCase(name="fastest decay", layout=_MIXED, heads=2, width=32, decay=(-5.0, -4.99), tolerance=_DECAYING),
    AttentionCase(name="hardly any decay", layout=_MIXED, heads=2, width=32, decay=(-1e-4, 0.0)),
    AttentionCase(name="decays of all sizes", layout=_MIXED, heads=2, width=32, decay=(-5.0, 0.0), tolerance=_DECAYING),
    AttentionCase(name="beta near 0", layout=_MIXED, heads=2, width=32, beta=(0.0, 1e-6)),
    AttentionCase(name="beta near 1", layout=_MIXED, heads=2, width=32, beta=(0.9999, 1.0)),
    AttentionCase(name="two heads of K3", layout=_LONG, heads=2, width=128),
    AttentionCase(name="odd rows and vectors", layout=Layout((21, 6, 15), (0, 3, 9)), heads=2, width=80),
)
CASES = (*_FLOAT32, *(case.in_bfloat16() for case in _FLOAT32))

_DECAY_FLOAT32 = (
    DecayCase(name="one token", rows=1, heads=3, width=16),
    DecayCase(name="two heads of K3", rows=5, heads=2, width=128),
    DecayCase(name="saturated", rows=7, heads=3, width=48, magnitude=50.0),
)
DECAY_CASES = (*_DECAY_FLOAT32, *(case.in_bfloat16() for case in _DECAY_FLOAT32))


@dataclass(frozen=True, kw_only=True)
class MixCase(Case):
    """A layer of `heads` heads of `width` with `taps` taps, over the sequences of `layout`."""

    layout: Layout
    heads: int
    width: int
    taps: int = 4
    has_state: bool = True


_MIX_FLOAT32 = (
    *(MixCase(name=name, layout=layout, heads=3, width=16) for name, layout in LAYOUTS.items()),
    MixCase(name="no state", layout=_MIXED, heads=2, width=48, has_state=False),
    MixCase(name="shorter than the taps", layout=Layout((1, 2, 3), (0, 1, 2)), heads=2, width=32),
    MixCase(name="six taps", layout=_MIXED, heads=2, width=32, taps=6),
    MixCase(name="two heads of K3", layout=_LONG, heads=2, width=128),
)
MIX_CASES = (*_MIX_FLOAT32, *(case.in_bfloat16() for case in _MIX_FLOAT32))

_Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor | None, Tensor, Tensor]


def attention_arguments(case: AttentionCase, generator: torch.Generator) -> _Arguments:
    """The first token's q and k are zero in head 0; states of other sequences hold NaN, a new sequence's is zero."""
    num_tokens, shape = case.layout.num_tokens, (case.layout.num_tokens, case.heads, case.width)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    q[0, 0], k[0, 0] = 0.0, 0.0
    g = torch.empty(shape).uniform_(*case.decay, generator=generator)
    beta = torch.empty(num_tokens, case.heads).uniform_(*case.beta, generator=generator)
    num_slots, state_slots = scattered_slots(len(case.layout.new), generator)
    state = None
    if case.has_state:
        state = torch.full((num_slots, case.heads, case.width, case.width), torch.nan)
        for slot, before in zip(state_slots.tolist(), case.layout.before, strict=True):
            state[slot] = torch.randn(state.shape[1:], generator=generator) if before else 0.0
    q, k, v = (x.to(case.dtype) for x in (q, k, v))
    return q, k, v, g, beta, _L2_EPS, state, state_slots, case.layout.cu_seqlens


def decay_arguments(case: DecayCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, float]:
    """Slopes from exp(-2) to exp(2)."""
    z = case.magnitude * torch.randn(case.rows, case.heads, case.width, generator=generator)
    a_log = torch.linspace(-2.0, 2.0, case.heads)
    dt_bias = torch.randn(case.heads, case.width, generator=generator)
    return z.to(case.dtype), a_log, dt_bias, _LOWER_BOUND


def mix_arguments(case: MixCase, generator: torch.Generator) -> tuple[Any, ...]:
    """Padding after the heads' slopes and states of other sequences hold NaN; a new sequence's states are zero."""
    num_tokens, size = case.layout.num_tokens, case.heads * case.width
    activations = [torch.randn(num_tokens, size, generator=generator) for _ in range(5)]
    activations.insert(4, torch.randn(num_tokens, case.heads, generator=generator))
    convs = [torch.randn(size, 1, case.taps, generator=generator) * case.taps**-0.5 for _ in range(3)]
    a_log = torch.cat((torch.linspace(-1.0, 1.0, case.heads), torch.full((2,), torch.nan)))
    dt_bias = torch.randn(size, generator=generator)
    o_norm = 1 + 0.5 * torch.randn(case.width, generator=generator)
    num_slots, state_slots = scattered_slots(len(case.layout.new), generator)
    state = conv_state = None
    if case.has_state:
        state = torch.full((num_slots, case.heads, case.width, case.width), torch.nan)
        conv_state = torch.full((num_slots, case.taps - 1, 3 * size), torch.nan, dtype=case.dtype)
        for slot, before in zip(state_slots.tolist(), case.layout.before, strict=True):
            state[slot] = torch.randn(state.shape[1:], generator=generator) if before else 0.0
            context = torch.randn(case.taps - 1, 3 * size, generator=generator)
            context[: max(0, case.taps - 1 - before)] = 0.0
            conv_state[slot] = context.to(case.dtype)
    weights = (*convs, a_log, dt_bias, o_norm, _LOWER_BOUND, _L2_EPS, _NORM_EPS)
    given = (x.to(case.dtype) for x in activations)
    return *given, *weights, state, conv_state, state_slots, case.layout.cu_seqlens


@dataclass(frozen=True, kw_only=True)
class CommitCase(Case):
    """Records of `layers` layers over the sequences of `layout`, of which `counts` tokens are taken each."""

    layout: Layout
    counts: tuple[int, ...]
    heads: int
    width: int
    layers: int = 2
    taps: int = 4


_VERIFY_FLOAT32 = tuple(case for case in _MIX_FLOAT32 if case.has_state)
VERIFY_CASES = (*_VERIFY_FLOAT32, *(case.in_bfloat16() for case in _VERIFY_FLOAT32))
_DRAFTED = Layout((8, 1, 3, 8), (40, 0, 7, 1))
_COMMIT_FLOAT32 = (
    CommitCase(name="some of each", layout=_DRAFTED, counts=(3, 1, 0, 8), heads=3, width=16),
    CommitCase(name="nothing", layout=_DRAFTED, counts=(0, 0, 0, 0), heads=2, width=32),
    CommitCase(name="all", layout=_DRAFTED, counts=(8, 1, 3, 8), heads=2, width=48),
    CommitCase(name="fewer than the taps", layout=_DRAFTED, counts=(1, 1, 2, 2), heads=2, width=16, taps=6),
    CommitCase(name="two heads of K3", layout=Layout((8,), (50,)), counts=(5,), heads=2, width=128, layers=3),
)
COMMIT_CASES = (*_COMMIT_FLOAT32, *(case.in_bfloat16() for case in _COMMIT_FLOAT32))


def verify_arguments(case: MixCase, generator: torch.Generator) -> tuple[Any, ...]:
    """Those of kda_mix, and records with two rows more than there are tokens, all zero."""
    given = mix_arguments(case, generator)
    rows = case.layout.num_tokens + 2
    inputs = torch.zeros(rows, 3 * case.heads * case.width, dtype=case.dtype)
    keys, decays, corrections = (torch.zeros(rows, case.heads, case.width) for _ in range(3))
    return *given, KdaRecords(inputs, keys.to(case.dtype), decays, corrections)


def commit_arguments(case: CommitCase, generator: torch.Generator) -> tuple[Any, ...]:
    """Rows beyond the tokens, and states of other sequences, hold NaN."""
    num_tokens, rows, size = case.layout.num_tokens, case.layout.num_tokens + 2, case.heads * case.width
    inputs = torch.full((case.layers, rows, 3 * size), torch.nan)
    keys, decays, corrections = (torch.full((case.layers, rows, case.heads, case.width), torch.nan) for _ in range(3))
    for record in (inputs, keys, corrections):
        record[:, :num_tokens].normal_(generator=generator)
    decays[:, :num_tokens].uniform_(0.01, 1.0, generator=generator)
    num_slots, state_slots = scattered_slots(len(case.layout.new), generator)
    state = torch.full((case.layers, num_slots, case.heads, case.width, case.width), torch.nan)
    conv_state = torch.full((case.layers, num_slots, case.taps - 1, 3 * size), torch.nan)
    for owner in (state, conv_state):
        own = owner[:, state_slots]
        owner[:, state_slots] = own.normal_(generator=generator)
    records = KdaRecords(inputs.to(case.dtype), keys.to(case.dtype), decays, corrections)
    counts = torch.tensor(case.counts)
    return state, conv_state.to(case.dtype), records, state_slots, case.layout.cu_seqlens, counts


TABLES: dict[str, CaseTable[Any]] = {
    "kda_decay": CaseTable(DECAY_CASES, decay_arguments),
    "kda_recurrent": CaseTable(CASES, attention_arguments),
    "kda_chunk": CaseTable(CASES, attention_arguments),
    "kda_mix": CaseTable(MIX_CASES, mix_arguments),
    "kda_verify": CaseTable(VERIFY_CASES, verify_arguments),
    "kda_commit": CaseTable(COMMIT_CASES, commit_arguments),
}
