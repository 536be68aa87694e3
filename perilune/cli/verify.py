"""`perilune verify`: checks of numbers against references."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

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
    mode: Annotated[str, typer.Option(help="How the tokens are fed: whole, chunked:N or decode.")] = "whole",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a golden file's tokens and print how far the logits are from the golden ones."""
    from perilune.verify.logits import verify_logits

    report = asdict(verify_logits(checkpoint, golden, dtype=dtype, mode=mode))
    if as_json:
        typer.echo(json.dumps(report))
        return
    for name, value in report.items():
        typer.echo(f"{name:<20}{value if isinstance(value, int) else format(value, '.3e')}")
