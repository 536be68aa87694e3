"""Every implementation of every op against its reference: over the case tables, under each instruction set here."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perilune import env, ops
from perilune.errors import ConfigError
from perilune.ops import _native
from perilune.ops.case import Case, CaseTable, largest_error, outcome
from perilune.ops.registry import BACKEND_ORDER, Implementation, Op, all_ops
from perilune.ops.tables import CASE_TABLES

REFERENCE, NATIVE = "reference", "native"
_SEED = 0


@dataclass(frozen=True)
class Skipped:
    """What was not run: one case, or with `case` None everything of that op, or with `op` None of that backend."""

    op: str | None
    backend: str
    isa: str | None
    case: str | None
    reason: str


@dataclass(frozen=True)
class Ran:
    """One case by one implementation. `error` is infinite where the call raised, or gave results of another kind.

    `reason` says why the tolerance is not zero, or what went wrong.
    """

    op: str
    backend: str
    isa: str | None
    case: str
    error: float
    tolerance: float
    reason: str

    @property
    def is_failed(self) -> bool:
        return not self.error <= self.tolerance


@dataclass
class OpsReport:
    """What `verify_ops` found, under which instruction sets."""

    isas: tuple[str, ...]
    ran: list[Ran] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def failed(self) -> list[Ran]:
        return [run for run in self.ran if run.is_failed]


def verify_ops(
    op_name: str | None = None, backend: str | None = None, on_case: Callable[[int, int], None] | None = None
) -> OpsReport:
    """Compare results, and what calls leave in their arguments, with the reference's.

    One op or one backend alone by name; `on_case` is told how many cases are done, and of how many. Raises ConfigError
    for a name that does not exist.
    """
    ops.load_all()
    chosen = _chosen(op_name, backend)
    report = OpsReport(_isas(), skipped=list(_missing(chosen, backend)))
    work = [(op, case) for op in chosen for case in CASE_TABLES[op.name].cases if _candidates(op, backend)]
    with _garbage_in_new_memory():
        for done, (op, case) in enumerate(work, 1):
            for finding in check_case(op, case, _candidates(op, backend), report.isas):
                if isinstance(finding, Ran):
                    report.ran.append(finding)
                else:
                    report.skipped.append(finding)
            if on_case is not None:
                on_case(done, len(work))
    return report


def check_case(op: Op[..., Any], case: Case, backends: Iterable[str], isas: Sequence[str]) -> Iterator[Ran | Skipped]:
    """Run one case by each of `backends`, the native one under each of `isas`."""
    table: CaseTable[Any] = CASE_TABLES[op.name]
    given = table.arguments(case, torch.Generator().manual_seed(_SEED))
    key = op.key(*given)
    expected = outcome(op.reference, given)
    for backend in backends:
        implementation = op.implementation(backend)
        assert implementation is not None
        refusal = implementation.supports(key)
        if refusal is not None:
            yield Skipped(op.name, backend, None, case.name, refusal)
            continue
        for isa in isas if backend == NATIVE else (None,):
            with _under(isa):
                yield _compare(op.name, implementation, isa, case, given, expected)


def _compare(
    op_name: str,
    implementation: Implementation[..., Any],
    isa: str | None,
    case: Case,
    given: tuple[Any, ...],
    expected: list[Tensor],
) -> Ran:
    reason, error = case.tolerance.reason, torch.inf
    try:
        found = outcome(implementation.call, given)
    except Exception as raised:  # whatever an implementation does wrong is a finding
        reason = f"raised {type(raised).__name__}: {raised}"
    else:
        if len(found) == len(expected):
            error = max(map(largest_error, expected, found), default=0.0)
        else:
            reason = f"{len(found)} tensors instead of {len(expected)}"
    return Ran(op_name, implementation.backend, isa, case.name, error, case.tolerance.relative, reason)


def _chosen(op_name: str | None, backend: str | None) -> list[Op[..., Any]]:
    known = all_ops()
    if op_name is not None and op_name not in known:
        raise ConfigError(f"--op is {op_name!r}; known are {', '.join(sorted(known))}")
    faster = [name for name in BACKEND_ORDER if name != REFERENCE]
    if backend is not None and backend not in faster:
        raise ConfigError(f"--backend is {backend!r}; allowed are {', '.join(faster)}")
    return [known[name] for name in sorted(known) if op_name in (None, name)]


def _candidates(op: Op[..., Any], backend: str | None) -> list[str]:
    """The op's backends that are to be run."""
    absent = NATIVE if _native.absence() is not None else None
    return [name for name in op.backends if name not in (REFERENCE, absent) and backend in (None, name)]


def _missing(chosen: Sequence[Op[..., Any]], backend: str | None) -> Iterator[Skipped]:
    """Native implementations that are not there, each with its reason."""
    if backend not in (None, NATIVE):
        return
    absence = _native.absence()
    if absence is not None:
        yield Skipped(None, NATIVE, None, None, absence)
        return
    for op in chosen:
        if NATIVE not in op.backends:
            yield Skipped(op.name, NATIVE, None, None, "the op has no native implementation")


def _isas() -> tuple[str, ...]:
    """The instruction set that the environment names, else all that this processor has."""
    if _native.absence() is not None:
        return ()
    core = _native.core()
    return (core.isa(),) if env.isa() is not None else tuple(core.available_isas())


@contextmanager
def _under(isa: str | None) -> Iterator[None]:
    """The native core on the instruction set `isa`; None leaves it alone."""
    if isa is None:
        yield
        return
    core = _native.core()
    before = core.isa()
    assert core.use_isa(isa)
    try:
        yield
    finally:
        core.use_isa(before)


@contextmanager
def _garbage_in_new_memory() -> Iterator[None]:
    """New tensors hold NaN or the largest integer, so that what is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
