"""The tensors behind block and slot ids. Knows shapes, never requests."""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from perilune.cache.moves import CopyBlock, Move
from perilune.cache.spec import DTYPE_BYTES, CacheGroupSpec, resolve_dtype
from perilune.errors import CapacityError

Bytes = npt.NDArray[np.uint8]

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
        self.num_slots = num_slots
        self.views: Mapping[str, torch.Tensor] = {
            group.name: _untouched_zeros(
                (group.num_layers, *seats[group.kind], *group.row_shape),
                _TORCH_DTYPES[resolve_dtype(group.dtype, dtype)],
            )
            for group in groups
        }
        self._rows = {kind: [_as_bytes(self.views[x.name]) for x in groups if x.kind == kind] for kind in seats}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all paged groups."""
        return _seat_bytes(self._rows["paged"])

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot over all state groups."""
        return _seat_bytes(self._rows["state"])

    def read_block(self, block_id: int) -> memoryview:
        """A copy of one block: of each paged group in turn the rows of every layer, as they lie in memory."""
        return _read(self._rows["paged"], block_id)

    def write_block(self, block_id: int, payload: memoryview) -> None:
        """Fill a block with what `read_block` gave; safe from any thread while nobody else uses the block.

        ValueError, with nothing written, when `payload` is not `block_bytes` long.
        """
        _write(self._rows["paged"], block_id, payload)

    def read_state(self, slot: int) -> memoryview:
        """A copy of one slot: of each state group in turn the state of every layer, as it lies in memory."""
        return _read(self._rows["state"], slot)

    def write_state(self, slot: int, payload: memoryview) -> None:
        """Fill a slot with what `read_state` gave, as `write_block` does a block."""
        _write(self._rows["state"], slot, payload)

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Clear the state of these slots in every state group."""
        self._zero("state", slots)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear all rows of these blocks in every paged group."""
        self._zero("paged", block_ids)

    def move(self, moves: Iterable[Move]) -> None:
        """Make these copies, in order."""
        for move in moves:
            kind = "paged" if isinstance(move, CopyBlock) else "state"
            for group in self._groups:
                if group.kind == kind:
                    self.views[group.name][:, move.target] = self.views[group.name][:, move.source]

    def is_finite(self, slot: int) -> bool:
        """Whether the state of a slot holds neither an infinity nor a NaN."""
        states = (self.views[group.name][:, slot] for group in self._groups if group.kind == "state")
        # the sum of the finite may overflow; their largest cannot
        return all(bool(layer.abs().amax().isfinite()) for state in states for layer in state)

    def _zero(self, kind: str, ids: Sequence[int]) -> None:
        for group in self._groups:
            if group.kind == kind and ids:
                self.views[group.name].view(torch.uint8)[:, list(ids)] = 0


def _as_bytes(view: torch.Tensor) -> Bytes:
    """The memory of a group as bytes [num_layers, seats, bytes of a seat]."""
    return view.view(torch.uint8).numpy().reshape(view.shape[0], view.shape[1], -1)


def _seat_bytes(groups: Sequence[Bytes]) -> int:
    return sum(rows.shape[0] * rows.shape[2] for rows in groups)


def _read(groups: Sequence[Bytes], seat: int) -> memoryview:
    payload = np.empty(_seat_bytes(groups), np.uint8)
    for rows, part in _parts(groups, payload):
        part[...] = rows[:, seat]
    return payload.data.toreadonly()


def _write(groups: Sequence[Bytes], seat: int, payload: memoryview) -> None:
    if payload.nbytes != _seat_bytes(groups):
        raise ValueError(f"{payload.nbytes} bytes are written over {_seat_bytes(groups)}")
    for rows, part in _parts(groups, np.frombuffer(payload, np.uint8)):
        rows[:, seat] = part


def _parts(groups: Sequence[Bytes], payload: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """Each group with its part of a payload as [num_layers, bytes of a seat]; numpy copies a part in one call."""
    start = 0
    for rows in groups:
        num_layers, _, num_bytes = rows.shape
        end = start + num_layers * num_bytes
        yield rows, payload[start:end].reshape(num_layers, num_bytes)
        start = end


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
