"""`perilune bench stream`: decoding from experts on disk."""

import json
from typing import Annotated

import typer

from perilune.cli import options


def bench_stream_command(
    checkpoint: options.Checkpoint = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="Memory for experts, as 1G; may be given again. Parts of all by default.", metavar="SIZE"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Steps that are timed for each size.", min=1)] = 16,
    page_faults: Annotated[
        bool, typer.Option("--page-faults", help="Time mapped files too, whose pages are cold at each step.")
    ] = False,
    dtype: options.Dtype = None,
    dense_weights: options.DenseWeights = "stored",
    activations: options.Activations = "exact",
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time decoding from experts on disk by the size of their cache, beside the disk's own rate."""
    from perilune.bench.stream.report import render_stream
    from perilune.bench.stream.run import bench_stream
    from perilune.config.engine import DEMO_CHECKPOINT, EngineConfig
    from perilune.ops.threads import set_num_threads

    if threads is not None:
        set_num_threads(threads)
    config = EngineConfig(dtype=dtype, dense_weights=dense_weights, activations=activations)
    sizes = [options.read_size(size, "--cache") for size in cache or ()]
    report = bench_stream(checkpoint or DEMO_CHECKPOINT, config, sizes, tokens, with_faults=page_faults)
    typer.echo(json.dumps(report.as_json()) if as_json else render_stream(report))
