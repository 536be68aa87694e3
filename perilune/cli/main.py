"""The `perilune` command: its sub-commands, and how failures end it."""

import sys
from typing import Annotated

import typer

from perilune import env
from perilune.cli import verify
from perilune.cli.bench.app import app as bench_app
from perilune.cli.chat import chat_command
from perilune.cli.generate import generate_command
from perilune.cli.inspect import inspect_command
from perilune.cli.make_checkpoint import make_checkpoint_command
from perilune.cli.plan import plan_command
from perilune.cli.render import render_command
from perilune.cli.serve import serve_command
from perilune.errors import PeriluneError

# what the shell gives for a wrong command line, and click too
EXIT_USAGE = 2

app = typer.Typer(
    help="Inference engine for Kimi K3 and Kimi K3.1 Pro.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # plain help loads in half the time
    rich_markup_mode=None,
)
app.command("serve")(serve_command)
app.command("chat")(chat_command)
app.command("generate")(generate_command)
app.command("inspect")(inspect_command)
app.command("plan")(plan_command)
app.command("make-checkpoint")(make_checkpoint_command)
app.command("render")(render_command)
app.add_typer(verify.app, name="verify")
app.add_typer(bench_app, name="bench")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from perilune import __version__

        typer.echo(f"perilune {__version__}")
        raise typer.Exit


@app.callback()
def perilune(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Inference engine for Kimi K3 and Kimi K3.1 Pro."""


def main() -> None:
    """Run the command line; what a person can cause is one message on stderr and exit code 2."""
    try:
        env.check()
        app()
    except PeriluneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
