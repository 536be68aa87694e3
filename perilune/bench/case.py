"""A case of `bench ops`: one op at one real size, with arguments that come from memory as they do in a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from perilune.bench.ceilings import Work
from perilune.ops.case import copied, tensors_in
from perilune.platform import largest_cache_bytes

T = TypeVar("T")

# Kimi K3
HIDDEN, HEADS, WIDTH, LATENT, INNER = 7168, 96, 128, 3584, 3072
NUM_EXPERTS, NUM_CHOSEN = 48, 16  # of the 896 experts so many lie in the memory of a small machine
TOKENS = (1, 4, 16, 64, 512)
CONTEXTS = (4096, 32768)
BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class BenchCase:
    """`arguments`: those of several calls that take turns.

    What is read from memory in a model lies there more than once, so that no call finds it in the cache. `is_cached`
    says that the previous op of a model leaves the arguments in the cache: then memory bounds nothing.
    """

    op: str
    name: str
    arguments: tuple[tuple[Any, ...], ...]
    work: Work
    is_cached: bool = False


Builder = Callable[[torch.Generator], Iterator[BenchCase]]


def rotated(value: T) -> list[T]:
    """Copies that together are four times as large as the largest cache; the value alone where it is that large."""
    size = sum(tensor.nbytes for tensor in tensors_in(value))
    count = max(1, min(-(-4 * largest_cache_bytes() // size), 64))
    return [value, *(copied(value) for _ in range(count - 1))]
