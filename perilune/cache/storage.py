"""The tensors behind block and slot ids. Knows shapes, never requests."""

import mmap
from collections.abc import Mapping, Sequence
from math import prod

import torch

from perilune.cache.spec import DTYPE_BYTES, CacheGroupSpec, resolve_dtype
from perilune.errors import CapacityError

_TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}


class CacheStorage:
    """One tensor per group, zero at first.

    `views[name]` is [num_layers, num_blocks, block_size, *row_shape] for a paged group and
    [num_layers, num_slots, *row_shape] for a state group. `dtype` is the model's compute dtype.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        dtype: str,
    ):
        seats = {"paged": (num_blocks, block_size), "state": (num_slots,)}
        self._groups = tuple(groups)
        self.views: Mapping[str, torch.Tensor] = {
            group.name: _untouched_zeros(
                (group.num_layers, *seats[group.kind], *group.row_shape),
                _TORCH_DTYPES[resolve_dtype(group.dtype, dtype)],
            )
            for group in groups
        }

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Clear the state of these slots in every state group."""
        self._zero("state", slots)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear all rows of these blocks in every paged group."""
        self._zero("paged", block_ids)

    def _zero(self, kind: str, ids: Sequence[int]) -> None:
        for group in self._groups:
            if group.kind == kind and ids:
                self.views[group.name].view(torch.uint8)[:, list(ids)] = 0


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which only the pages in use take memory: a cache sized for many requests costs what is in it."""
    num_bytes = prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"this machine refuses {num_bytes} bytes for the cache: lower num_blocks, cache_bytes or max_num_seqs"
        ) from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)
