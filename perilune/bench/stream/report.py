"""What decoding from experts on disk reached, as a table and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StreamRun:
    """Decoding one sequence from a cache of `cache_bytes`; None for mapped files, whose pages are cold at each step.

    Rates are per second. `hit_rate`: experts in memory when their layer came; `early_rate`: being read ahead by then.
    `read_rate`: bytes a second while a step waited for experts with nothing to compute; `waited_share`: that part of
    the time; `overall_rate`: bytes a second of the whole time. `disk_rate`: what
    direct reads alone reached right before and after, the better of the two, as a shared disk wanders.
    """

    cache_bytes: int | None
    tokens_per_second: float
    bytes_per_token: float
    hit_rate: float
    early_rate: float
    read_rate: float
    waited_share: float
    overall_rate: float
    disk_rate: float
    peak_anonymous_bytes: int


@dataclass(frozen=True)
class StreamReport:
    """The runs of one checkpoint."""

    checkpoint: str
    experts_bytes: int
    runs: tuple[StreamRun, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def render_stream(report: StreamReport) -> str:
    """The table for people."""
    columns = {"cache": 12, "tokens/s": 10, "GB/token": 10, "hits": 7, "early": 7, "waiting": 9, "GB/s": 7}
    columns |= {"disk": 7, "share": 7, "memory": 10}
    lines = [
        f"{report.checkpoint}: experts take {report.experts_bytes / 1e9:.2f} GB",
        "".join(f"{name:>{width}}" for name, width in columns.items()),
    ]
    for run in report.runs:
        name = "page faults" if run.cache_bytes is None else f"{run.cache_bytes / 1e9:.2f} GB"
        lines.append(
            f"{name:>12}{run.tokens_per_second:>10.3f}{run.bytes_per_token / 1e9:>10.3f}{run.hit_rate:>7.0%}"
            f"{run.early_rate:>7.0%}{run.waited_share:>9.0%}{run.read_rate / 1e9:>7.2f}"
            f"{run.disk_rate / 1e9:>7.2f}{run.read_rate / run.disk_rate:>7.0%}{run.peak_anonymous_bytes / 1e9:>7.2f} GB"
        )
    return "\n".join(lines)
