"""`perilune plan`: how a model would run on a machine, what limits it, and which plans are refused why."""

import json
from pathlib import Path
from typing import Annotated

import typer

from perilune.errors import ConfigError


def plan_command(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory; only its config.json is read.", show_default=False)
    ] = None,
    hardware: Annotated[str, typer.Option(help="A machine of perilune/planner/profiles, or this one: this.")] = "this",
    config: Annotated[
        Path | None, typer.Option(help="A config.json alone, without a checkpoint.", show_default=False)
    ] = None,
    nodes: Annotated[int, typer.Option(help="Machines that run the model together.")] = 1,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each request; 131072 or the model's context.", show_default=False)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every refused plan.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the best plan as an SVG file.", show_default=False)] = None,
) -> None:
    """Show which placements of a model fit a machine, their capacity and time, and the settings that realise them."""
    from perilune.config.parse import load_model_config
    from perilune.planner.hardware import load_hardware
    from perilune.planner.report import render, to_json
    from perilune.planner.search import Question, search

    if (checkpoint is None) == (config is None):
        raise ConfigError("give either a checkpoint directory or --config FILE, and not both")
    source = checkpoint or config
    assert source is not None
    model = load_model_config(source)
    asked = min(Question.context, model.max_position_embeddings) if context is None else context
    result = search(model, load_hardware(hardware), Question(nodes, asked, concurrency))
    name = "CHECKPOINT" if checkpoint is None else str(checkpoint)
    if plot is not None:
        from perilune.planner.plot import plot as draw

        if not result.plans:
            raise ConfigError(f"--plot has nothing to draw: no plan fits {hardware}; leave --plot out to see why")
        try:
            plot.write_text(draw(model, result, result.plans[0]), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot cannot write {plot}: {error.strerror}; name a file in a directory") from None
    typer.echo(json.dumps(to_json(model, result, name), indent=2) if as_json else render(model, result, name))
