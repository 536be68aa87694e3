"""The experts of layers that stay in the files of a checkpoint, of which the native core keeps some in memory.

Passes compute on the experts that are there while the others are read. What is read ahead changes when a pass is done,
never what it gives.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from perilune.errors import CapacityError, CheckpointError
from perilune.ops import _native
from perilune.ops.moe.expert_table import PackedExpert

# Reads in flight that keep a solid-state disk busy while they stay as large as a matrix.
NUM_READERS = 4
# Each tensor is read from and to a multiple of this many bytes.
ALIGNMENT = 4096


@dataclass(frozen=True)
class ExpertPlaces:
    """Where packed experts lie: file, first byte and bytes of the six tensors of `PackedExpert`.

    `places` int64 [L, E, 6, 3], the first number an index into `files`; `inner` and `latent` are the widths I and D.
    """

    files: tuple[str, ...]
    places: Tensor
    inner: int
    latent: int

    @property
    def num_layers(self) -> int:
        return self.places.shape[0]

    @property
    def num_experts(self) -> int:
        return self.places.shape[1]


@dataclass(frozen=True)
class StreamStats:
    """Counts since the stream was opened. A use is an expert that one pass over a layer chose.

    `hits` were in memory, `early` were being read ahead of their layer; the rest were missing. `expected`: reads begun
    ahead. `busy_s`: time with at least one read in progress; `waited_s`: time in which a pass had nothing to compute,
    and `waited_bytes` what was read meanwhile.
    """

    passes: int
    uses: int
    hits: int
    early: int
    expected: int
    read_bytes: int
    waited_bytes: int
    busy_s: float
    waited_s: float


class ExpertStream:
    """A bounded cache of whole experts over all layers; `num_slots` of them, `slot_bytes` each.

    Without the native core nothing is kept, and the reference reads every expert that it computes. Raises
    CheckpointError for a file that cannot be opened, CapacityError where the system grants no such memory.
    """

    def __init__(self, places: ExpertPlaces, *, slot_bytes: int, num_slots: int, num_readers: int = NUM_READERS):
        self.places = places
        self.cache: Any = None
        if _native.absence() is not None:
            return
        given = places.places.contiguous()
        sizes = (
            given.shape[0] * given.shape[1] * given.shape[2],
            places.num_layers,
            slot_bytes,
            num_slots,
            num_readers,
        )
        try:
            self.cache = _native.core().ExpertCache(list(places.files), given.data_ptr(), *sizes)
        except RuntimeError as error:
            raise CheckpointError(str(error)) from None
        except MemoryError:
            raise CapacityError(
                f"the system grants no {num_slots * slot_bytes} bytes for experts: lower expert_cache_bytes"
            ) from None

    @property
    def num_bytes(self) -> int:
        """Memory of the cache."""
        return 0 if self.cache is None else self.cache.num_slots * self.cache.slot_bytes

    @property
    def is_direct(self) -> bool:
        """Whether reads go past the system's page cache."""
        return self.cache is not None and bool(self.cache.is_direct)

    def table(self, layer: int) -> "StreamedTable":
        """The experts of one layer, counted among those that have experts."""
        return StreamedTable(self, layer)

    def take_faults(self) -> list[tuple[int, str]]:
        """Rows of the passes since the last call whose results are void, and why."""
        found: list[tuple[int, str]] = [] if self.cache is None else self.cache.take_faults()
        return found

    def stats(self) -> StreamStats:
        """What happened so far."""
        counts = dict.fromkeys(StreamStats.__annotations__, 0.0) if self.cache is None else self.cache.stats()
        whole = {name: int(counts[name]) for name, kind in StreamStats.__annotations__.items() if kind is int}
        return StreamStats(**whole, busy_s=counts["busy_s"], waited_s=counts["waited_s"])


class StreamedTable:
    """The experts of one layer as `ExpertTable` has them, but in their files."""

    is_packed = True

    def __init__(self, stream: ExpertStream, layer: int):
        self.stream, self.layer = stream, layer

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, I, D): experts, inner width, width of their input and output."""
        places = self.stream.places
        return places.num_experts, places.inner, places.latent

    @cached_property
    def sample(self) -> Tensor:
        """A tensor of the weights' dtype."""
        return torch.empty(0, dtype=torch.uint8)

    def fetch(self, expert_ids: Tensor, *, is_certain: bool) -> None:
        """Begin to read what a pass over expert_ids [T, K] int64 will need, or may need; returns at once."""
        if self.stream.cache is None:
            return
        ids = expert_ids.contiguous()
        _native.core().fetch_experts(self.stream.cache, self.layer, ids.data_ptr(), ids.numel(), is_certain)

    def __getitem__(self, expert: int) -> PackedExpert:
        """One expert, read anew. Raises CheckpointError."""
        _, inner, latent = self.shape
        widths = [(inner, latent), (inner, latent), (latent, inner)]
        shapes = [(rows, columns // part) for rows, columns in widths for part in (2, 32)]
        places = self.stream.places
        read = (
            _read(places.files[file], begin, size) for file, begin, size in places.places[self.layer, expert].tolist()
        )
        return PackedExpert(*(tensor.view(shape) for tensor, shape in zip(read, shapes, strict=True)))


def _read(file: str, begin: int, size: int) -> Tensor:
    try:
        with open(file, "rb", buffering=0) as stream:
            data = bytearray(os.pread(stream.fileno(), size, begin))
    except OSError as error:
        raise CheckpointError(f"{file}: reading bytes {begin} to {begin + size} failed: {error.strerror}") from None
    if len(data) != size:
        raise CheckpointError(f"{file} ends before byte {begin + size}, where an expert ends: download it again")
    return torch.frombuffer(data, dtype=torch.uint8)
