"""The options that several commands share, and how their values are read."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.errors import ConfigError

if TYPE_CHECKING:
    from perilune.config.engine import EngineConfig

# K, KiB and the like are powers of 1024; KB and the like powers of 1000
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

Checkpoint = Annotated[
    Path | None, typer.Argument(help="Checkpoint directory; the bundled demo by default.", show_default=False)
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest context in tokens; what the model and the cache allow by default.", min=1)
]
Dtype = Annotated[
    str | None, typer.Option(help="Compute dtype: float32 or bfloat16; what suits this machine by default.")
]
DenseWeights = Annotated[
    str, typer.Option(help="Projections of the layers: stored, or made int8 or fp8 at load, half the bytes.")
]
Activations = Annotated[
    str, typer.Option(help="exact, or int8: rounds what int8 and MXFP4 weights multiply, for speed.")
]
CacheDtype = Annotated[
    str, typer.Option(help="Cached rows of attention: auto is the compute dtype; fp8 or int8 take half the bytes.")
]
IndexCacheDtype = Annotated[str, typer.Option(help="Cached index keys (K3.1): auto, fp8, int8 or mxfp4.")]
GrammarBackend = Annotated[
    str, typer.Option(help="Library that compiles grammars: llguidance; xgrammar, the extra of that name.")
]
NumBlocks = Annotated[int | None, typer.Option(help="Size of the cache in blocks of 16 tokens.", min=1)]
CacheMemory = Annotated[
    str | None, typer.Option(help="Size of the cache, as 512M or 4G; what is free by default.", metavar="SIZE")
]
ExpertCacheMemory = Annotated[
    str | None,
    typer.Option(
        help="Keep routed experts on disk, and so much of them in memory, as 16G; chosen by itself where needed.",
        metavar="SIZE",
    ),
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        help="Most memory for everything together, as 64G; routed experts that exceed it stay on disk.", metavar="SIZE"
    ),
]
Speculative = Annotated[
    str,
    typer.Option(
        help="Who guesses tokens that a step verifies, without changing answers: off; ngram, copies of the text; "
        "dspark, the draft in the checkpoint's folder draft; or a draft's directory."
    ),
]
NumDrafts = Annotated[
    int | None, typer.Option(help="Most guesses of an answer in a step; the draft's own number, or 7.", min=1)
]
DraftRule = Annotated[
    str,
    typer.Option(
        help="matching: guesses change no token; token or block: drawn answers get drawn guesses, of which more stay, "
        "and keep their law but not the tokens of a seed."
    ),
]
DraftRopeTheta = Annotated[
    float | None, typer.Option(help="The base of the draft's rotary angles, where its config.json is wrong.")
]
DraftRopeInterleaved = Annotated[
    bool | None,
    typer.Option(help="Whether adjacent channels of the draft turn together.", show_default=False),
]
PrefixCache = Annotated[bool, typer.Option(help="Keep what requests leave behind for those with the same beginning.")]
StateInterval = Annotated[int, typer.Option(help="Tokens between the states kept of a long prompt.", min=1)]
StateCacheMemory = Annotated[
    str | None, typer.Option(help="Room for kept states; a share of the cache by default.", metavar="SIZE")
]
HostCacheBytes = Annotated[
    str, typer.Option(help="Memory for what the cache gives up, as 4G; none by default.", metavar="SIZE")
]
KvDir = Annotated[
    Path | None, typer.Option(help="Directory for what memory gives up, and for the next start.", show_default=False)
]
KvDirBytes = Annotated[
    str | None, typer.Option(help="Most that the directory may hold; 16G by default.", metavar="SIZE")
]
ImageCacheMemory = Annotated[
    str, typer.Option(help="Embeddings of pictures kept for requests with the same picture.", metavar="SIZE")
]
Images = Annotated[
    list[Path] | None, typer.Option(help="A picture before the message; may be given again.", show_default=False)
]
Threads = Annotated[int | None, typer.Option(help="Processor threads to compute with; all by default.", min=1)]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer in tokens; up to the context by default.", min=1)]
Temperature = Annotated[float, typer.Option(help="0 takes the most probable token.")]
TopP = Annotated[float, typer.Option(help="Draw from the most probable tokens that sum to this.")]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")]
Effort = Annotated[str, typer.Option(help="How much to think: low, high, max, or none to answer at once.")]
System = Annotated[str | None, typer.Option(help="A system message before the first turn.")]


# Options that read as sizes, and the settings they become.
_SIZES = {
    "cache_memory": "cache_bytes",
    "state_cache_memory": "state_cache_bytes",
    "host_cache_bytes": "host_cache_bytes",
    "kv_dir_bytes": "kv_dir_bytes",
    "image_cache_memory": "image_cache_bytes",
    "expert_cache_memory": "expert_cache_bytes",
    "memory_budget": "memory_budget_bytes",
}


def engine_config(given: Mapping[str, Any], **settings: Any) -> "EngineConfig":
    """The engine's settings from a command's options, by their names; `settings` come on top.

    Other options of the command are left alone. Raises ConfigError for a value that cannot be.
    """
    from perilune.config.engine import EngineConfig

    names = {field.name for field in fields(EngineConfig)} - _SIZES.keys()
    own = {name: value for name, value in given.items() if name in names}
    sizes: dict[str, Any] = {_SIZES[name]: _size(name, value) for name, value in given.items() if name in _SIZES}
    return EngineConfig(**own, **sizes, **settings)


def changed_options(given: Mapping[str, Any]) -> dict[str, object]:
    """Those options of a command that set the engine and are not at their defaults, under their names on the line."""
    from perilune.config.engine import EngineConfig

    config = engine_config(given)
    names = {name: _SIZES.get(name, name) for name in given}
    return {
        _option(name): getattr(config, setting)
        for name, setting in names.items()
        if hasattr(config, setting) and getattr(config, setting) != getattr(EngineConfig(), setting)
    }


def _size(name: str, value: str | None) -> int | None:
    return None if value is None else read_size(value, _option(name))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_size(text: str, option: str) -> int:
    """Bytes of a size: 512M, 4G and 4GiB are binary, 4GB decimal; ConfigError for anything else names the option."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or ((match[3] or "").lower() == "ib" and not match[2]):
        raise ConfigError(
            f"{option} is {text!r}; give a number of bytes, or one with K, M, G or T after it (4G = 4GiB = 4 * 2^30, "
            "4GB = 4 * 10^9)"
        )
    units = _DECIMAL_UNITS if (match[3] or "").lower() == "b" else _UNITS
    return int(float(match[1]) * units[match[2].upper()])
