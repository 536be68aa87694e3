"""`perilune generate`: one answer or continuation, offline, printed as it comes."""

from typing import Annotated

import typer

from perilune.cli import options
from perilune.cli.backend import LocalBackend, user_content
from perilune.cli.chat import Screen
from perilune.errors import ConfigError


def generate_command(
    checkpoint: options.Checkpoint = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue as it stands.", show_default=False)] = None,
    chat: Annotated[str | None, typer.Option(help="A message to answer.", show_default=False)] = None,
    image: options.Images = None,
    system: options.System = None,
    effort: options.Effort = "max",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.95,
    top_k: Annotated[int, typer.Option(help="Draw from this many most probable tokens; 0 is off.")] = 0,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None,
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
    expert_cache_memory: options.ExpertCacheMemory = None,
    memory_budget: options.MemoryBudget = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
) -> None:
    """Answer a message or continue a text, and leave."""
    given = locals()
    from perilune.sampling.params import SamplingParams

    if (prompt is None) == (chat is None):
        raise ConfigError("give either --prompt TEXT, to continue it, or --chat TEXT, to have it answered")
    if prompt is not None and system is not None:
        raise ConfigError("--system has no effect with --prompt; use --chat")
    if prompt is not None and image:
        raise ConfigError("--image has no effect with --prompt; use --chat")
    content = user_content(chat or "", image or ())
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens, stop=tuple(stop or ())
    )
    config = options.engine_config(given, max_num_seqs=1)
    backend = LocalBackend(checkpoint, config, threads)
    screen = Screen()
    try:
        if prompt is not None:
            screen.end(backend.continue_text(prompt, params, screen.show))
        else:
            turns: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
            turns.append({"role": "user", "content": content})
            screen.end(backend.answer(turns, effort, params, screen.show))
    finally:
        backend.close()
