"""What a load comes to: latencies, rates, goodput and cached share, under the names of vLLM's benchmark."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

from perilune.bench.serve.driver import Played, Record
from perilune.errors import ConfigError

MEASURES = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")
TOTALS = (
    *("duration", "completed", "failed", "abandoned", "total_input_tokens", "total_output_tokens"),
    *("total_cached_tokens", "cached_share", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_concurrent_requests"),
)


@dataclass(frozen=True)
class Summary:
    """Mean, median, standard deviation and 99th percentile in milliseconds; all None where there is no value."""

    mean: float | None
    median: float | None
    std: float | None
    p99: float | None


def summarise(seconds: Sequence[float]) -> Summary:
    """Of values in seconds; percentiles interpolate linearly between neighbours."""
    if not seconds:
        return Summary(None, None, None, None)
    ms = [value * 1e3 for value in seconds]
    return Summary(fmean(ms), median(ms), pstdev(ms), percentile(ms, 99))


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one value, linear between the neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def read_goals(texts: Sequence[str]) -> dict[str, float]:
    """Service levels such as "ttft:500" as milliseconds by measure; ConfigError for anything else."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if name not in GOALS or not 0 < value < float("inf") or name in goals:
            raise ConfigError(
                f"--goodput is {text!r}; give one of {', '.join(GOALS)}, a colon and milliseconds, such as ttft:500, "
                "each at most once"
            )
        goals[name] = value
    return goals


@dataclass(frozen=True)
class Report:
    """The figures of one load. Rates are per second; `request_goodput` is None without service levels."""

    duration: float
    completed: int
    failed: int
    abandoned: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    max_concurrent_requests: int
    request_goodput: float | None
    summaries: Mapping[str, Summary]
    median_ttft_ms_by_turn: tuple[float | None, ...]
    cached_share_by_turn: tuple[float, ...]
    errors: Mapping[str, int]
    client_lag_p99_ms: float
    client_cpu_share: float

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens, how many came from the server's cache, 0 to 1."""
        return self.total_cached_tokens / max(self.total_input_tokens, 1)

    def as_json(self) -> dict[str, Any]:
        """One flat object, but for `errors` and the lists by turn."""
        latencies = {
            f"{kind}_{measure}_ms": getattr(self.summaries[measure], kind)
            for measure in MEASURES
            for kind in ("mean", "median", "std", "p99")
        }
        return {
            **{name: getattr(self, name) for name in TOTALS},
            **latencies,
            "median_ttft_ms_by_turn": list(self.median_ttft_ms_by_turn),
            "cached_share_by_turn": list(self.cached_share_by_turn),
            "errors": dict(self.errors),
            "client_lag_p99_ms": self.client_lag_p99_ms,
            "client_cpu_share": self.client_cpu_share,
        }


def make_report(played: Played, goals: Mapping[str, float]) -> Report:
    """Count and summarise; only answers that came whole count, but for `failed`, `abandoned` and `errors`."""
    whole = [record for record in played.records if record.error is None]
    turns = range(max((record.turn + 1 for record in whole), default=0))
    by_turn = [[record for record in whole if record.turn == turn] for turn in turns]
    num_good = sum(_is_good(record, goals) for record in whole)
    return Report(
        duration=played.duration_s,
        completed=len(whole),
        failed=len(played.records) - len(whole),
        abandoned=played.num_abandoned,
        total_input_tokens=sum(record.num_prompt_tokens for record in whole),
        total_output_tokens=sum(record.num_output_tokens for record in whole),
        total_cached_tokens=sum(record.num_cached_tokens for record in whole),
        max_concurrent_requests=played.max_concurrent,
        request_goodput=num_good / played.duration_s if goals else None,
        summaries={
            "ttft": summarise([record.ttft_s for record in whole]),
            "tpot": summarise([record.tpot_s for record in whole if record.tpot_s is not None]),
            "itl": summarise([gap for record in whole for gap in record.itls_s]),
            "e2el": summarise([record.e2el_s for record in whole]),
        },
        median_ttft_ms_by_turn=tuple(summarise([record.ttft_s for record in records]).median for records in by_turn),
        cached_share_by_turn=tuple(_cached_share(records) for records in by_turn),
        errors=dict(Counter(record.error for record in played.records if record.error is not None)),
        client_lag_p99_ms=percentile(played.lags_s, 99) * 1e3 if played.lags_s else 0.0,
        client_cpu_share=played.cpu_s / played.duration_s,
    )


def _is_good(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether an answer met every service level; an answer of one token has no time per output token to miss."""
    reached = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(reached[name] * 1e3 <= limit for name, limit in goals.items())


def _cached_share(records: Sequence[Record]) -> float:
    total = sum(record.num_prompt_tokens for record in records)
    return sum(record.num_cached_tokens for record in records) / max(total, 1)


def render_report(report: Report) -> str:
    """The report for people."""
    lines = [
        f"{'requests':<34}{report.completed} completed, {report.failed} failed, {report.abandoned} never sent",
        f"{'duration':<34}{report.duration:.2f} s, at most {report.max_concurrent_requests} requests at once",
        f"{'requests per second':<34}{report.request_throughput:.2f}",
        f"{'tokens per second':<34}{report.output_throughput:.1f}, with prompts {report.total_token_throughput:.1f}",
        f"{'prompt tokens':<34}{report.total_input_tokens}, {report.cached_share:.1%} of them cached",
    ]
    if report.request_goodput is not None:
        lines.append(f"{'requests per second within goals':<34}{report.request_goodput:.2f}")
    lines.append(f"\n{'ms':<34}{'mean':>10}{'median':>10}{'p99':>10}")
    names = {"ttft": "to the first token", "tpot": "per further token", "itl": "between events", "e2el": "whole answer"}
    for measure, name in names.items():
        found = report.summaries[measure]
        values = "".join(f"{'-' if ms is None else f'{ms:.2f}':>10}" for ms in (found.mean, found.median, found.p99))
        lines.append(f"{f'{name} ({measure.upper()})':<34}{values}")
    if len(report.cached_share_by_turn) > 1:
        lines.append(f"\n{'turn':<34}{'TTFT, median':>14}{'cached':>10}")
        for turn, share in enumerate(report.cached_share_by_turn):
            ttft = report.median_ttft_ms_by_turn[turn]
            lines.append(f"{turn + 1:<34}{'-' if ttft is None else f'{ttft:.2f}':>14}{share:>10.1%}")
    lines += [f"{'failed: ' + kind:<34}{count}" for kind, count in report.errors.items()]
    lines.append(
        f"\nthe client used {report.client_cpu_share:.0%} of a processor; 99 of 100 of its timers were late by "
        f"{report.client_lag_p99_ms:.1f} ms at most"
    )
    return "\n".join(lines)
