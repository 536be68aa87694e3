"""What decoding from experts on disk reached, as a table and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StreamRun:
    """Decoding one sequence from a cache of `cache_bytes`; None for mapped files, whose pages are cold at each step.

    Rates are per second. `hit_rate`: experts in memory when their layer came; `early_rate`: being read ahead by then.
    `read_rate`: bytes a second while a read was in progress; `busy_share`: that part of the time.
    """

    cache_bytes: int | None
    tokens_per_second: float
    bytes_per_token: float
    hit_rate: float
    early_rate: float
    read_rate: float
    busy_share: float
    peak_anonymous_bytes: int


@dataclass(frozen=True)
class StreamReport:
    """The runs of one checkpoint and the disk's ceilings, before and after them."""

    checkpoint: str
    experts_bytes: int
    disk_rates: tuple[float, float]
    runs: tuple[StreamRun, ...]

    @property
    def ceiling(self) -> float:
        """Bytes a second: the better of the two, as a shared disk wanders."""
        return max(self.disk_rates)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ceiling": self.ceiling}


def render_stream(report: StreamReport) -> str:
    """The table for people."""
    first, last = report.disk_rates
    disk = f"{first / 1e9:.2f} GB/s before, {last / 1e9:.2f} GB/s after"
    columns = {"cache": 12, "tokens/s": 10, "GB/token": 10, "hits": 7, "early": 7, "reading": 9, "GB/s": 7}
    columns |= {"of the disk": 13, "memory": 10}
    lines = [
        f"{report.checkpoint}: experts take {report.experts_bytes / 1e9:.2f} GB; direct reads of one matrix: {disk}",
        "".join(f"{name:>{width}}" for name, width in columns.items()),
    ]
    for run in report.runs:
        name = "page faults" if run.cache_bytes is None else f"{run.cache_bytes / 1e9:.2f} GB"
        lines.append(
            f"{name:>12}{run.tokens_per_second:>10.3f}{run.bytes_per_token / 1e9:>10.3f}{run.hit_rate:>7.0%}"
            f"{run.early_rate:>7.0%}{run.busy_share:>9.0%}{run.read_rate / 1e9:>7.2f}"
            f"{run.read_rate / report.ceiling:>13.0%}{run.peak_anonymous_bytes / 1e9:>7.2f} GB"
        )
    return "\n".join(lines)
