"""`perilune bench comm`: sums among processes of this machine, beside torch's gloo."""

import json
from typing import Annotated

import typer


def bench_comm_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time sums of two processes at 14 KiB and 1 MiB: shared memory of the native core, and gloo, in one run."""
    from perilune.bench.parallel.sums import bench_sums
    from perilune.bench.process import OthersClock

    others = OthersClock()
    timings = bench_sums()
    if as_json:
        typer.echo(json.dumps({"sums": [timing.as_json() for timing in timings], "others_cores": others.cores()}))
        return
    typer.echo(f"{'bytes':>10}{'shared memory, us':>28}{'gloo, us':>24}{'times':>8}   median (least)")
    for timing in timings:
        own = f"{1e6 * timing.shared_memory_s:.1f} ({1e6 * timing.shared_memory_least_s:.1f})"
        gloo = f"{1e6 * timing.gloo_s:.1f} ({1e6 * timing.gloo_least_s:.1f})"
        typer.echo(f"{timing.num_bytes:>10}{own:>28}{gloo:>24}{timing.ratio:>8.1f}")
    typer.echo(f"processors that others used meanwhile: {others.cores():.2f}")
