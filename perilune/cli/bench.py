"""`perilune bench`: times beside what this machine allows, which is measured first."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli import options

if TYPE_CHECKING:
    from perilune.bench.ops import OpTiming

app = typer.Typer(no_args_is_help=True, help="Measure times beside what this machine allows.")


@app.callback()
def bench() -> None:
    """Measure times beside what this machine allows."""


@app.command("ops")
def ops(
    op: Annotated[list[str] | None, typer.Option(help="This op; may be given again.", show_default=False)] = None,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the ops at the sizes of Kimi K3: median, least and greatest, share of the ceiling that binds, reference."""
    from tqdm import tqdm

    from perilune.bench.ceilings import measure_ceilings
    from perilune.bench.ops import bench_ops
    from perilune.ops.threads import set_num_threads

    if threads is not None:
        set_num_threads(threads)
    ceilings = measure_ceilings()
    timings = bench_ops(op or (), ceilings)
    if as_json:
        found = [timing.as_json() for timing in tqdm(timings, desc="cases", disable=None, leave=False)]
        typer.echo(json.dumps({"ceilings": ceilings.as_json(), "ops": found}))
        return
    typer.echo(f"{ceilings}\n")
    typer.echo(
        f"{'op':<18}{'case':<48}{'backend':<10}{'median (least-greatest)':>30}{'GB/s':>8}{'GFLOP/s':>9}"
        f"{'share of bound':>20}{'x reference':>13}"
    )
    for timing in timings:
        typer.echo(render_timing(timing))


def render_timing(timing: "OpTiming") -> str:
    """One line of the table."""
    start, seconds = f"{timing.op:<18}{timing.case:<48}{timing.backend:<10}", timing.seconds
    if seconds is None:
        return f"{start}  {timing.note}"
    taken = f"{_time(seconds.median)} ({_time(seconds.low)}-{_time(seconds.high)})"
    share = "-" if timing.share is None else f"{timing.share:.0%} {timing.bound}"
    faster = f"{timing.times_faster:.1f}" if timing.times_faster is not None else "-"
    rates = f"{timing.read_bytes / seconds.median / 1e9:>8.1f}{timing.flops / seconds.median / 1e9:>9.1f}"
    return f"{start}{taken:>30}{rates}{share:>20}{faster:>13}  {timing.note}".rstrip()


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
