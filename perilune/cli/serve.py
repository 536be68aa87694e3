"""`perilune serve`: the server with a checkpoint behind it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune import env
from perilune.cli import options
from perilune.server.operations.log_format import LogFormat, LogLevel, configure_logs

if TYPE_CHECKING:
    from perilune.config.engine import EngineConfig
    from perilune.engine.client import EngineClient
    from perilune.server.settings import ServerSettings
    from perilune.text.tokenizer import Tokenizer

ApiKey = Annotated[
    str | None, typer.Option(help="Key that clients must send; PERILUNE_API_KEY by default.", show_default=False)
]
ServedModelName = Annotated[
    str | None, typer.Option(help="Name of the model for clients; that of its directory by default.")
]
MaxItl = Annotated[
    float | None,
    typer.Option(help="Most milliseconds between two tokens of an answer while prompts are read; no bound by default."),
]
SchedulingPolicy = Annotated[
    str, typer.Option(help="fcfs: in order of arrival; priority: by the priority of requests first.")
]
AllowImageUrls = Annotated[
    bool, typer.Option("--allow-image-urls", help="Fetch pictures that requests name by public web addresses.")
]
Profile = Annotated[
    str,
    typer.Option(help="Allowed sampling: open (any), kimi (as Moonshot's own service) or kvv."),
]
MaxWaiting = Annotated[
    int | None, typer.Option(help="Most requests that wait; more get status 429. Any number by default.", min=0)
]
RequestTimeout = Annotated[
    float | None, typer.Option(help="Most seconds that a request may take; any time by default.")
]
EngineProcess = Annotated[
    bool, typer.Option(help="Run the engine in a process of its own, which is restarted once when it dies.")
]
StepTimeout = Annotated[
    float, typer.Option(help="Seconds after which a step counts as stuck: /health says so, the log says where.")
]


def serve_command(
    checkpoint: options.Checkpoint = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free.", min=0, max=65535)] = 8000,
    api_key: ApiKey = None,
    served_model_name: ServedModelName = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run at once.", min=1)] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.", min=1)] = 512,
    max_itl: MaxItl = None,
    scheduling_policy: SchedulingPolicy = "fcfs",
    max_waiting: MaxWaiting = None,
    request_timeout: RequestTimeout = None,
    max_model_len: options.MaxModelLen = None,
    num_blocks: options.NumBlocks = None,
    cache_memory: options.CacheMemory = None,
    expert_cache_memory: options.ExpertCacheMemory = None,
    memory_budget: options.MemoryBudget = None,
    prefix_cache: options.PrefixCache = True,
    state_interval: options.StateInterval = 8192,
    state_cache_memory: options.StateCacheMemory = None,
    host_cache_bytes: options.HostCacheBytes = "0",
    kv_dir: options.KvDir = None,
    kv_dir_bytes: options.KvDirBytes = None,
    image_cache_memory: options.ImageCacheMemory = "512M",
    allow_image_urls: AllowImageUrls = False,
    dtype: options.Dtype = None,
    dense_weights: options.DenseWeights = "stored",
    activations: options.Activations = "exact",
    cache_dtype: options.CacheDtype = "auto",
    index_cache_dtype: options.IndexCacheDtype = "auto",
    speculative: options.Speculative = "off",
    num_drafts: options.NumDrafts = None,
    draft_rule: options.DraftRule = "matching",
    draft_rope_theta: options.DraftRopeTheta = None,
    draft_rope_interleaved: options.DraftRopeInterleaved = None,
    grammar_backend: options.GrammarBackend = "llguidance",
    threads: options.Threads = None,
    profile: Profile = "open",
    drain_timeout: Annotated[float, typer.Option(help="Seconds that answers may take to finish at shutdown.")] = 30.0,
    engine_process: EngineProcess = True,
    step_timeout: StepTimeout = 300.0,
    debug_routes: Annotated[bool, typer.Option("--debug-routes", help="Answer /debug/cache.")] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Lines of stderr: text or json.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="The least serious lines that are written.")] = LogLevel.INFO,
) -> None:
    """Serve a model with the OpenAI API."""
    given = locals()
    from perilune.server.process import bind
    from perilune.server.settings import ServerSettings

    prepare = partial(configure_logs, log_format, log_level)
    prepare()
    settings = ServerSettings(
        api_key=env.api_key() if api_key is None else api_key,
        drain_timeout_s=drain_timeout,
        allow_image_urls=allow_image_urls,
        request_timeout_s=request_timeout,
        profile=profile,
        has_debug_routes=debug_routes,
    )
    config = options.engine_config(given, max_itl_ms=max_itl)
    bound = bind(host, port)
    how: Any = {"name": served_model_name, "num_threads": threads, "step_timeout_s": step_timeout}
    client, tokenizer = _start(engine_process, prepare, checkpoint, config, how)
    _serve(client, tokenizer, settings, bound)


def _start(
    own_process: bool, prepare: Callable[[], None], checkpoint: Path | None, config: "EngineConfig", how: dict[str, Any]
) -> "tuple[EngineClient, Tokenizer]":
    """The engine, in a process of its own or in this one."""
    from perilune.cli.backend import start_engine, start_engine_process

    if own_process:
        return start_engine_process(checkpoint, config, prepare=prepare, **how)
    return start_engine(checkpoint, config, **how)


def _serve(client: "EngineClient", tokenizer: "Tokenizer", settings: "ServerSettings", bound: socket) -> None:
    """Serve until a signal ends it."""
    from perilune.server.app import create_app
    from perilune.server.process import Server

    address, bound_port = bound.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address

    def say_ready() -> None:
        model = client.model
        typer.echo(f"{model.name} is served at http://{shown}:{bound_port}/v1 (context {model.max_model_len} tokens)")

    Server(create_app(client, tokenizer, settings), bound, settings.drain_timeout_s, say_ready).run_until_stopped()
