"""Medians, spreads and ratios over repeated runs, as a table and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.peers.engines import LESS_IS_BETTER

PEAK_MEMORY = "peak memory, GB"


@dataclass(frozen=True)
class Reading:
    """One figure of one run."""

    figure: str
    variant: str
    repetition: int
    value: float
    is_disturbed: bool


@dataclass(frozen=True)
class Spread:
    """A median between the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


def spreads(readings: Iterable[Reading]) -> dict[str, dict[str, Spread]]:
    """Per figure and variant; disturbed runs count only where there are no others."""
    values: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        values.setdefault((reading.figure, reading.variant), []).append(reading)
    table: dict[str, dict[str, Spread]] = {}
    for (figure, variant), group in values.items():
        quiet = [r.value for r in group if not r.is_disturbed]
        spread = Spread.of(quiet or [r.value for r in group])
        if figure == PEAK_MEMORY:
            spread = Spread(spread.high, spread.high, spread.high)
        table.setdefault(figure, {})[variant] = spread
    return table


def ratios(readings: Sequence[Reading], base: str) -> dict[str, dict[str, Spread]]:
    """Per figure and variant, how many times better than `base`: of each repetition's own pair, then their spread."""
    found = {(r.figure, r.variant, r.repetition): r for r in readings if r.figure != PEAK_MEMORY}
    pairs: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for (figure, variant, repetition), reading in found.items():
        other = found.get((figure, base, repetition))
        if variant != base and other is not None:
            better = reading.value / other.value
            ratio = 1 / better if figure in LESS_IS_BETTER else better
            pairs.setdefault((figure, variant), []).append((ratio, reading.is_disturbed or other.is_disturbed))
    table: dict[str, dict[str, Spread]] = {}
    for (figure, variant), group in pairs.items():
        quiet = [ratio for ratio, is_disturbed in group if not is_disturbed]
        table.setdefault(figure, {})[variant] = Spread.of(quiet or [ratio for ratio, _ in group])
    peaks = spreads(readings).get(PEAK_MEMORY, {})
    for variant, peak in peaks.items():
        if variant != base and base in peaks:
            table.setdefault(PEAK_MEMORY, {})[variant] = Spread.of([peaks[base].median / peak.median])
    return table


def summary(readings: Sequence[Reading], base: str) -> dict[str, Any]:
    """Both tables as JSON."""

    def plain(table: dict[str, dict[str, Spread]]) -> dict[str, dict[str, dict[str, float]]]:
        return {f: {v: spread.as_dict() for v, spread in row.items()} for f, row in table.items()}

    disturbed = sum(reading.is_disturbed for reading in readings)
    return {
        "figures": plain(spreads(readings)),
        "times_better_than": base,
        "ratios": plain(ratios(readings, base)),
        "readings": len(readings),
        "disturbed_readings": disturbed,
    }


def render(readings: Sequence[Reading], variants: Sequence[str]) -> str:
    """The table for people: medians (least-greatest), then how many times better than the first variant."""
    base = variants[0]
    found, compared = spreads(readings), ratios(readings, base)
    head = ["figure", *variants, *(f"{v} / {base}" for v in variants[1:])]
    rows = [head, ["---"] * len(head)]
    for figure, by_variant in found.items():
        cells = [str(by_variant.get(v, "-")) for v in variants]
        cells += [str(compared.get(figure, {}).get(v, "-")) for v in variants[1:]]
        rows.append([figure, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join(lines)
