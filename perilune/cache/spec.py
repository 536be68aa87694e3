"""What a model wants remembered between steps, as shapes and counts.

A model declares its groups; nobody here knows what they mean. Free of torch: planners and tests use it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from perilune.errors import ConfigError

CacheKind = Literal["paged", "state"]
CacheDtype = Literal["model", "bfloat16", "float32", "float8_e4m3fn", "int8", "uint8"]

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}


def resolve_dtype(dtype: CacheDtype, model_dtype: str) -> str:
    """The concrete dtype name of a group in a model that computes in `model_dtype`."""
    name = model_dtype if dtype == "model" else dtype
    if name not in DTYPE_BYTES:
        raise ConfigError(f"cache dtype {name!r} is not supported; allowed: {', '.join(sorted(DTYPE_BYTES))}")
    return name


@dataclass(frozen=True)
class CacheGroupSpec:
    """One kind of cached row: `paged` has a row per token, `state` has a row per request.

    `row_shape` is the shape of one row of one layer; `dtype` "model" follows the compute dtype. A row whose
    elements are bytes is as long as it has bytes, whatever they mean to the model.
    """

    name: str
    kind: CacheKind
    num_layers: int
    row_shape: tuple[int, ...]
    dtype: CacheDtype = "model"

    def row_bytes(self, model_dtype: str) -> int:
        """Bytes of one row over all layers: per token (paged) or per request (state)."""
        return self.num_layers * prod(self.row_shape) * DTYPE_BYTES[resolve_dtype(self.dtype, model_dtype)]


def bytes_per_token(groups: Iterable[CacheGroupSpec], model_dtype: str) -> int:
    """Bytes that one token adds to all paged groups together."""
    return sum(group.row_bytes(model_dtype) for group in groups if group.kind == "paged")


def bytes_per_slot(groups: Iterable[CacheGroupSpec], model_dtype: str) -> int:
    """Bytes of one request's seat in all state groups together."""
    return sum(group.row_bytes(model_dtype) for group in groups if group.kind == "state")
