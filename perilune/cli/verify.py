"""`perilune verify`: checks of numbers against references."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli import options

if TYPE_CHECKING:
    from perilune.verify.ops import OpsReport

app = typer.Typer(no_args_is_help=True, help="Check results against references.")


@app.callback()
def verify() -> None:
    """Check results against references."""


@app.command("logits")
def logits(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory.", show_default=False)],
    golden: Annotated[
        Path, typer.Option(help="File with token_ids [T] and logits [T, vocab_size].", show_default=False)
    ],
    dtype: Annotated[str, typer.Option(help="Compute dtype: float32 or bfloat16.")] = "float32",
    dense_weights: options.DenseWeights = "stored",
    activations: options.Activations = "exact",
    cache_dtype: options.CacheDtype = "auto",
    index_cache_dtype: options.IndexCacheDtype = "auto",
    backend: Annotated[
        str | None, typer.Option(help="Let it alone compute what it implements, as reference.", show_default=False)
    ] = None,
    mode: Annotated[str, typer.Option(help="How the tokens are fed: whole, chunked:N or decode.")] = "whole",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a golden file's tokens and print how far the logits are from the golden ones."""
    from perilune.config.engine import EngineConfig
    from perilune.verify.logits import only, verify_logits

    config = EngineConfig(
        dtype=dtype,
        dense_weights=dense_weights,
        activations=activations,
        cache_dtype=cache_dtype,
        index_cache_dtype=index_cache_dtype,
        ops=only(backend) if backend else {},
    )
    report = asdict(verify_logits(checkpoint, golden, config, mode=mode))
    if as_json:
        typer.echo(json.dumps(report))
        return
    for name, value in report.items():
        typer.echo(f"{name:<20}{value if isinstance(value, int) else format(value, '.3e')}")


@app.command("ops")
def ops(
    op: Annotated[str | None, typer.Option(help="This op alone.", show_default=False)] = None,
    backend: Annotated[str | None, typer.Option(help="This backend alone.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run every implementation of every op against its reference, under every instruction set of this machine.

    Exit code 1 when one of them is further off than its case allows.
    """
    from tqdm import tqdm

    from perilune.verify.ops import verify_ops

    with tqdm(desc="cases", disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        report = verify_ops(op, backend, show)
    typer.echo(json.dumps(ops_report(report)) if as_json else render_ops(report))
    if report.failed:
        raise typer.Exit(1)


@app.command("quality")
def quality(
    checkpoint: options.Checkpoint = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="This setting beside the baseline; may be given again.")
    ] = None,
    skill: Annotated[list[str] | None, typer.Option(help="This skill alone; may be given again.")] = None,
    questions: Annotated[int | None, typer.Option(help="Most questions of each skill; all by default.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask held-out questions through a server in every setting and print the share of exact answers.

    Exit code 1 when a setting costs more than a point against bfloat16 without a cache.
    """
    from tqdm import tqdm

    from perilune.config.engine import DEMO_CHECKPOINT
    from perilune.verify.quality.questions import load_questions
    from perilune.verify.quality.report import as_values, render
    from perilune.verify.quality.run import losses, measure
    from perilune.verify.quality.settings import chosen_settings

    directory = checkpoint or DEMO_CHECKPOINT
    asked = load_questions(skill or (), questions)
    settings = chosen_settings(setting or (), directory)
    total = len(settings) * sum(map(len, asked.values()))
    with tqdm(total=total, unit="answer", disable=None, leave=False) as bar:
        results = list(measure([str(directory)], asked, settings, _served, bar.update))
    typer.echo(json.dumps(as_values(results)) if as_json else render(results))
    if losses(results):
        raise typer.Exit(1)


@contextmanager
def _served(arguments: Sequence[str]) -> Iterator[str]:
    """The address of a server of our own."""
    from perilune.bench.serve.own_server import own_server

    with own_server(arguments) as server:
        yield server.url


def ops_report(report: "OpsReport") -> dict[str, Any]:
    """What was run, skipped and failed, as JSON values; an error that is not finite is null."""
    return {
        "ran": len(report.ran),
        "skipped": [asdict(skip) for skip in report.skipped],
        "failed": [asdict(run) | {"error": _finite(run.error)} for run in report.failed],
        "isas": list(report.isas),
        "implementations": [
            {"op": op, "backend": backend, "isa": isa, "ran": ran, "share_of_tolerance": _finite(share)}
            for (op, backend, isa), (ran, share) in _by_implementation(report).items()
        ],
    }


def render_ops(report: "OpsReport") -> str:
    """One line for each implementation and instruction set, then what was left out and what failed."""
    lines = [f"{'op':<24}{'backend':<12}{'isa':<12}{'ran':>6}{'error / allowed':>18}"]
    for (op, backend, isa), (ran, share) in _by_implementation(report).items():
        lines.append(f"{op:<24}{backend:<12}{isa or '-':<12}{ran:>6}{share:>18.3f}")
    reasons = Counter((skip.backend, skip.op, skip.reason) for skip in report.skipped)
    for (backend, skipped_op, reason), count in reasons.items():
        lines.append(f"skipped {count:>3}: {skipped_op or 'all ops'}, {backend}: {reason}")
    for failure in report.failed:
        where = f"{failure.op}, {failure.backend}, {failure.isa or '-'}, {failure.case}"
        lines.append(f"FAILED {where}: error {failure.error:.2e}, allowed {failure.tolerance:.2e} ({failure.reason})")
    lines.append(f"ran {len(report.ran)}, skipped {len(report.skipped)}, failed {len(report.failed)}")
    return "\n".join(lines)


def _by_implementation(report: "OpsReport") -> dict[tuple[str, str, str | None], tuple[int, float]]:
    """Per op, backend and instruction set: cases run, and the largest error as a share of what is allowed."""
    found: dict[tuple[str, str, str | None], tuple[int, float]] = {}
    for run in report.ran:
        key = (run.op, run.backend, run.isa)
        ran, share = found.get(key, (0, 0.0))
        own = run.error / run.tolerance if run.tolerance else math.inf if run.error else 0.0
        found[key] = (ran + 1, max(share, own))
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1], item[0][2] or "")))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
