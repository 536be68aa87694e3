"""perilune: an inference engine for Kimi K3 and Kimi K3.1 Pro. The names here load what they need when first used."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.engine.llm import LLM
    from perilune.sampling.params import SamplingParams

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "perilune.engine.llm", "SamplingParams": "perilune.sampling.params"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("perilune")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'perilune' has no attribute {name!r}; it has {', '.join(__all__)}")
