"""`bench ops`: each op at the sizes of Kimi K3, beside what the machine allows and beside its reference."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from perilune import ops
from perilune.bench import mixer_cases, row_cases, sampling_cases, weight_cases
from perilune.bench.case import BenchCase, Builder
from perilune.bench.ceilings import Ceilings
from perilune.bench.spread import Spread, time_calls
from perilune.errors import ConfigError
from perilune.ops.registry import Op, all_ops

BUILDERS: dict[str, Builder] = {
    **row_cases.BUILDERS,
    **weight_cases.BUILDERS,
    **mixer_cases.BUILDERS,
    **sampling_cases.BUILDERS,
}
# a reference that would take longer is not run
LONGEST_REFERENCE_S = 5.0
REFERENCE = "reference"


@dataclass(frozen=True)
class OpTiming:
    """One case. `bound` names what binds, with the share of that ceiling; None where nothing does.

    `seconds` or `reference_s` is None where that was not run: `note` says why. `read_ceiling` was measured just before.
    """

    op: str
    case: str
    backend: str
    seconds: Spread | None
    read_bytes: float
    flops: float
    read_ceiling: float
    bound: str | None
    share: float | None
    reference_s: float | None
    note: str

    @property
    def times_faster(self) -> float | None:
        """How many times the reference's time it saves."""
        if self.seconds is None or self.reference_s is None:
            return None
        return self.reference_s / self.seconds.median

    def as_json(self) -> dict[str, Any]:
        seconds = self.seconds
        return {
            "op": self.op,
            "case": self.case,
            "backend": self.backend,
            "median_s": seconds and seconds.median,
            "low_s": seconds and seconds.low,
            "high_s": seconds and seconds.high,
            "read_bytes": self.read_bytes,
            "flops": self.flops,
            "read_ceiling": self.read_ceiling,
            "bound": self.bound,
            "share_of_ceiling": self.share,
            "reference_s": self.reference_s,
            "times_faster_than_reference": self.times_faster,
            "note": self.note,
        }


def bench_ops(names: Sequence[str], ceilings: Ceilings) -> Iterator[OpTiming]:
    """Time the named ops (all without a name); ConfigError for one that does not exist."""
    for name in names:
        if name not in BUILDERS:
            raise ConfigError(f"--op is {name!r}; known are {', '.join(sorted(BUILDERS))}")
    ops.load_all()
    for name in names or sorted(BUILDERS):
        reference = ReferenceClock(all_ops()[name].reference, ceilings)
        with torch.inference_mode():
            for case in BUILDERS[name](torch.Generator().manual_seed(0)):
                yield _time(case, ceilings, reference)


class ReferenceClock:
    """Times an op's reference, and foresees from the cases before how long the next takes."""

    def __init__(self, reference: Callable[..., object], ceilings: Ceilings):
        self._reference, self._ceilings = reference, ceilings
        self._seen: list[tuple[float, float]] = []  # least seconds that the work allows, seconds taken

    def time(self, case: BenchCase) -> tuple[float | None, str]:
        """Seconds, or None and the reason."""
        ideal_s = max(case.work.ideal_s(self._ceilings).values())
        expected_s = self._foresee(ideal_s)
        if expected_s > LONGEST_REFERENCE_S:
            return None, f"the reference would take about {expected_s:.0f} s"
        found = time_calls(_calls(self._reference, case), fewest=1, most=20).median
        # half of the first time is taken for work that does not grow with the size
        self._seen = [*self._seen[-1:], (ideal_s, found)] if self._seen else [(0.0, found / 2), (ideal_s, found)]
        return found, ""

    def _foresee(self, ideal_s: float) -> float:
        """A straight line through the two cases before."""
        if not self._seen:
            return 0.0
        (first_ideal_s, first), (second_ideal_s, second) = self._seen
        growth = ideal_s - second_ideal_s
        if growth <= 0 or second_ideal_s == first_ideal_s:
            return second
        return second + growth * max(0.0, (second - first) / (second_ideal_s - first_ideal_s))


def _time(case: BenchCase, ceilings: Ceilings, reference: ReferenceClock) -> OpTiming:
    op = all_ops()[case.op]
    backend = _backend(op, case)
    reference_s, note = reference.time(case)
    seconds: Spread | None = None
    if backend != REFERENCE or reference_s is not None:
        ceilings = ceilings.with_read_measured_again()
        seconds = time_calls(_calls(op, case))
    if backend == REFERENCE:
        reference_s = None
        note = note or "runs on the reference"
    bound, share = (None, None) if seconds is None else _share(case, ceilings, seconds.median)
    work = case.work
    return OpTiming(
        op=case.op,
        case=case.name,
        backend=backend,
        seconds=seconds,
        read_bytes=work.read_bytes,
        flops=work.flops,
        read_ceiling=ceilings.read,
        bound=bound,
        share=share,
        reference_s=reference_s,
        note=note,
    )


def _calls(function: Callable[..., object], case: BenchCase) -> list[Callable[[], object]]:
    return [partial(function, *arguments) for arguments in case.arguments]


def _backend(op: Op[..., Any], case: BenchCase) -> str:
    candidates = op.explain(op.key(*case.arguments[0]))
    return next(candidate.backend for candidate in candidates if candidate.is_chosen)


def _share(case: BenchCase, ceilings: Ceilings, seconds: float) -> tuple[str | None, float | None]:
    ideal = case.work.ideal_s(ceilings)
    if case.is_cached:
        del ideal["memory"]
    bound = max(ideal, key=ideal.__getitem__)
    return (bound, ideal[bound] / seconds) if ideal[bound] else (None, None)
