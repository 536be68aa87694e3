"""`perilune bench serve`: a server under load."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perilune import env
from perilune.cli import options
from perilune.errors import ConfigError

if TYPE_CHECKING:
    from perilune.bench.serve.run import Finished, Load

DEFAULT_CONCURRENCY = 16
DEFAULT_TOOL_LEN = 64


def bench_serve_command(
    checkpoint: options.Checkpoint = None,
    url: Annotated[str | None, typer.Option(help="A running server; else one is started on the checkpoint.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model at --url; its first by default.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server at --url; PERILUNE_API_KEY by default.", show_default=False)
    ] = None,
    server_flags: Annotated[
        str | None, typer.Option(help="Options of the server that is started, as one text.", show_default=False)
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Conversations; each is --turns requests.")] = 100,
    request_rate: Annotated[
        float | None, typer.Option(help="Conversations that begin per second (Poisson); as room allows by default.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Most conversations at once; 16, or with --request-rate no bound.", min=1)
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt, without its shared prefix.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    range_ratio: Annotated[float, typer.Option(help="How far lengths vary both ways, 0 to 1.")] = 0.0,
    prefix_len: Annotated[int, typer.Option(help="Tokens that prompts begin with and share.")] = 0,
    num_prefixes: Annotated[int | None, typer.Option(help="Different shared prefixes; 1 by default.")] = None,
    turns: Annotated[int, typer.Option(help="Requests of a conversation; each goes on from the real answer.")] = 1,
    tool_len: Annotated[int | None, typer.Option(help="Tokens that a later turn adds; 64 by default.")] = None,
    tool_pause: Annotated[float | None, typer.Option(help="Seconds before a later turn; 0 by default.")] = None,
    text_file: Annotated[Path | None, typer.Option(help="Cut prompts from this text.", show_default=False)] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Random ids are below this; 256 by default.")] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Goal as ttft:500 (ms; ttft, tpot, e2el); may be given again.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal prompts and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time a server under load: latencies, rates, goodput and cached share."""
    from perilune.bench.serve.figures import read_goals
    from perilune.bench.serve.run import Load
    from perilune.bench.serve.workload import NUM_BYTE_IDS, Workload

    _need("--url", url is not None, {"--model": model, "--api-key": api_key})
    _need("a server started here, so no --url", url is None, {"CHECKPOINT": checkpoint, "--server-flags": server_flags})
    _need("--prefix-len", prefix_len > 0, {"--num-prefixes": num_prefixes})
    _need("--turns above 1", turns > 1, {"--tool-len": tool_len, "--tool-pause": tool_pause})
    _need("random ids, so no --text-file", text_file is None, {"--vocab-size": vocab_size})
    workload = Workload(
        num_prompts=num_prompts,
        request_rate=request_rate,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        num_prefixes=1 if num_prefixes is None else num_prefixes,
        turns=turns,
        tool_len=DEFAULT_TOOL_LEN if tool_len is None else tool_len,
        tool_pause_s=tool_pause or 0.0,
        seed=seed,
    )
    if concurrency is None and request_rate is None:
        concurrency = DEFAULT_CONCURRENCY
    num_ids = NUM_BYTE_IDS if vocab_size is None else vocab_size
    load = Load(workload, concurrency, text_file, num_ids, read_goals(goodput or ()))
    if url is None:
        arguments = [] if checkpoint is None else [str(checkpoint)]
        finished = _run_on_own_server([*arguments, *_split(server_flags or "")], load)
    else:
        finished = _run(url, load, model, env.api_key() if api_key is None else api_key)
    _show(finished, as_json)


def _run_on_own_server(arguments: list[str], load: "Load") -> "Finished":
    from perilune.bench.serve.own_server import own_server

    with own_server(arguments) as server:
        return _run(server.url, load, None, env.api_key())


def _run(url: str, load: "Load", model: str | None, api_key: str | None) -> "Finished":
    import asyncio

    from perilune.bench.serve.run import run_load

    return asyncio.run(run_load(url, load, model=model, api_key=api_key))


def _show(finished: "Finished", as_json: bool) -> None:
    """Print the figures; exit code 1 when no request was answered."""
    import json

    from perilune.bench.serve.figures import render_report

    typer.echo(json.dumps(finished.as_json()) if as_json else render_report(finished.report))
    if finished.report.completed == 0:
        raise typer.Exit(1)


def _split(flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--server-flags is {flags!r}: {error}; quote it as a shell would") from error


def _need(what: str, is_given: bool, settings: dict[str, object]) -> None:
    """Refuse options that would have no effect."""
    for name, value in settings.items():
        if value is not None and not is_given:
            raise ConfigError(f"{name} is {value}, which has an effect only with {what}; leave it out")
