"""`perilune bench`: times of ops, prompts and steps beside what this machine allows, which is measured first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli import options
from perilune.cli.bench.comm import bench_comm_command
from perilune.cli.bench.serve import bench_serve_command
from perilune.cli.bench.stream import bench_stream_command

if TYPE_CHECKING:
    from perilune.bench.model import ModelBench, Run
    from perilune.bench.ops import OpTiming
    from perilune.bench.report import Need
    from perilune.config.engine import EngineConfig
    from perilune.config.model import ModelConfig

app = typer.Typer(no_args_is_help=True, help="Measure times beside what this machine allows.")
app.command("comm")(bench_comm_command)
app.command("serve")(bench_serve_command)
app.command("stream")(bench_stream_command)


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
    from perilune.bench.process import OthersClock
    from perilune.ops.threads import set_num_threads

    if threads is not None:
        set_num_threads(threads)
    ceilings, others = measure_ceilings(), OthersClock()
    timings = bench_ops(op or (), ceilings)
    if as_json:
        found = [timing.as_json() for timing in tqdm(timings, desc="cases", disable=None, leave=False)]
        typer.echo(json.dumps({"ceilings": ceilings.as_json(), "ops": found, "others_cores": others.cores()}))
        return
    typer.echo(f"{ceilings}\n")
    typer.echo(
        f"{'op':<18}{'case':<48}{'backend':<10}{'median (least-greatest)':>30}{'GB/s':>8}{'GFLOP/s':>9}"
        f"{'share of bound':>20}{'x reference':>13}"
    )
    for timing in timings:
        typer.echo(render_timing(timing))
    typer.echo(f"\nprocessors that others used meanwhile: {others.cores():.2f}")


@app.command("prefill")
def prefill(
    checkpoint: options.Checkpoint = None,
    tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=1)] = 512,
    repeats: Annotated[int, typer.Option(help="Prompts that are timed.", min=1)] = 3,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.", min=1)] = 512,
    dtype: options.Dtype = None,
    dense_weights: options.DenseWeights = "stored",
    activations: options.Activations = "exact",
    cache_dtype: options.CacheDtype = "auto",
    index_cache_dtype: options.IndexCacheDtype = "auto",
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time prompts of random tokens from a checkpoint's engine."""
    from perilune.bench.report import prefill_need
    from perilune.config.engine import EngineConfig

    config = EngineConfig(
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=dtype,
        dense_weights=dense_weights,
        activations=activations,
        cache_dtype=cache_dtype,
        index_cache_dtype=index_cache_dtype,
    )
    _bench_model(checkpoint, config, threads, as_json, lambda model: model.prefill(tokens, repeats), prefill_need)


@app.command("decode")
def decode(
    checkpoint: options.Checkpoint = None,
    context: Annotated[int, typer.Option(help="Tokens before the first step; their rows are random.", min=0)] = 0,
    tokens: Annotated[int, typer.Option(help="Steps that are timed.", min=1)] = 32,
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences that decode together; 1, or with --speculative 1, 4 and 16, by default.", min=1),
    ] = None,
    speculative: options.Speculative = "off",
    num_drafts: options.NumDrafts = None,
    dtype: options.Dtype = None,
    dense_weights: options.DenseWeights = "stored",
    activations: options.Activations = "exact",
    cache_dtype: options.CacheDtype = "auto",
    index_cache_dtype: options.IndexCacheDtype = "auto",
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time decode steps of a checkpoint's engine; random tokens follow each other, so that experts vary.

    With --speculative, real answers of `tokens` tokens to three kinds of text, with guesses and without in turns.
    """
    given = locals()
    from perilune.bench.report import decode_need

    config = options.engine_config(given)
    if speculative != "off":
        return _bench_drafts(checkpoint, config, threads, as_json, tokens, (1, 4, 16) if batch is None else (batch,))

    def execute(model: "ModelBench") -> "Run":
        return model.decode(context, tokens, batch or 1)

    return _bench_model(checkpoint, config, threads, as_json, execute, decode_need)


def _bench_drafts(
    checkpoint: Path | None,
    config: "EngineConfig",
    threads: int | None,
    as_json: bool,
    num_tokens: int,
    batches: tuple[int, ...],
) -> None:
    from perilune.bench.drafts.run import HEADER, DraftBench, render
    from perilune.config.engine import DEMO_CHECKPOINT
    from perilune.ops.threads import set_num_threads

    if threads is not None:
        set_num_threads(threads)
    bench = DraftBench(checkpoint or DEMO_CHECKPOINT, config, num_tokens=num_tokens, max_batch=max(batches))
    if as_json:
        runs = bench.run(batches, lambda _: None)
        typer.echo(json.dumps({"checkpoint": str(checkpoint or DEMO_CHECKPOINT), "runs": [x.as_json() for x in runs]}))
        return
    typer.echo(HEADER)
    bench.run(batches, lambda run: typer.echo(render(run)))


def _bench_model(
    checkpoint: Path | None,
    config: "EngineConfig",
    threads: int | None,
    as_json: bool,
    execute: "Callable[[ModelBench], Run]",
    need_of: "Callable[[ModelConfig, EngineConfig, str, Run], Need]",
) -> None:
    from perilune.bench.ceilings import measure_ceilings
    from perilune.bench.model import ModelBench
    from perilune.bench.report import make_report, render_report
    from perilune.config.engine import DEMO_CHECKPOINT
    from perilune.ops.threads import set_num_threads

    if threads is not None:
        set_num_threads(threads)
    ceilings, directory = measure_ceilings(), checkpoint or DEMO_CHECKPOINT
    model = ModelBench(directory, config, ceilings.read_again)
    run = execute(model)
    need = need_of(model.text_config, config, model.dtype, run)
    reached = ceilings if run.reads is None else ceilings.with_reads(run.reads)
    report = make_report(str(directory), config, model.dtype, run, need, reached)
    typer.echo(json.dumps(report.as_json()) if as_json else render_report(report))


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
