"""Every environment variable perilune reads, and the only place that reads them."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perilune.errors import ConfigError

PREFIX = "PERILUNE_"


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the type of its value, its default as text, and what it does."""

    name: str
    type: str
    default: str
    doc: str


API_KEY = Variable("PERILUNE_API_KEY", "text", "unset", "the bearer token that every request to the server must carry")
GOLDENS = Variable("PERILUNE_GOLDENS", "directory", "../shared/golden", "where the tests look for golden checkpoints")
ISA = Variable("PERILUNE_ISA", "name", "the widest there is", "the native core's instruction set, to bisect")
VARIABLES = (API_KEY, GOLDENS, ISA)


def api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The server's API key, or None where none is required; a key that is set but blank raises ConfigError."""
    key = environ.get(API_KEY.name)
    if key is not None and not key.strip():
        raise ConfigError(f"{API_KEY.name} is set but blank; give it a key, or unset it to serve without one")
    return key


def goldens(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of golden checkpoints; it need not exist."""
    return Path(environ.get(GOLDENS.name, GOLDENS.default))


def isa(environ: Mapping[str, str] = os.environ) -> str | None:
    """The instruction set to force on the native core, or None for the widest."""
    return environ.get(ISA.name)


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for a PERILUNE_ variable that does not exist, so that a typing error is not a silence."""
    known = [variable.name for variable in VARIABLES]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            # the prefix alone would make every name alike
            near = difflib.get_close_matches(
                name.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known], n=1
            )
            remedy = f"did you mean {PREFIX}{near[0]}? otherwise unset it" if near else "unset it"
            raise ConfigError(f"unknown environment variable {name}; known are {', '.join(known)}: {remedy}")
