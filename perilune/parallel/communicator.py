"""What ranks exchange: the protocol, one rank alone, and the processes of one machine through shared memory."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from perilune.errors import ConfigError, PeerError
from perilune.ops import _native

SLOT_BYTES = 1 << 20
# Where files are memory.
_SHARED_MEMORY = Path("/dev/shm")


class Communicator(Protocol):
    """A group of ranks. All ranks make the same calls in the same order, with tensors of one shape and dtype.

    Every call raises PeerError where a peer has ended or does not come in time, and from then on always.
    """

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """x [...] float32 or bfloat16, contiguous, becomes the sum over ranks, in place; returns it.

        Added in float32 in the order of the ranks and rounded once: the same bits on every rank and in every run.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """x [...] of every rank -> [num_ranks, ...]."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x [...], contiguous, becomes that of rank `source`, in place; returns it."""

    def barrier(self) -> None:
        """Returns when every rank has entered it."""


class LocalCommunicator:
    """One rank alone: nothing to exchange."""

    rank = 0
    num_ranks = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        assert source == 0
        return x

    def barrier(self) -> None:
        return


class SharedMemoryCommunicator:
    """The ranks of one machine, by the native core. Waits spin for 50 us, then sleep.

    A peer that ended is missed within a tenth of a second, one that lives and does not come after `timeout_s`.
    """

    def __init__(self, path: Path, rank: int, num_ranks: int, *, timeout_s: float, slot_bytes: int = SLOT_BYTES):
        """Joins the group of `path` (see `new_group`) and waits until all ranks have; raises PeerError and ConfigError.

        Larger tensors go by in pieces of `slot_bytes`; the group takes twice that for each rank in shared memory.
        """
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank is {rank}; allowed: 0 to {num_ranks - 1}")
        self.rank, self.num_ranks = rank, num_ranks
        core = _native.core()
        self._peer_error: type[Exception] = core.PeerError
        try:
            self._group = core.Communicator(str(path), rank, num_ranks, slot_bytes, timeout_s)
        except core.PeerError as error:
            raise PeerError(f"{error} while the group of {num_ranks} ranks was joined") from None
        except RuntimeError as error:
            raise ConfigError(f"no group at {path}: {error}; give each rank once, and room in {path.parent}") from None

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        with self._missed():
            self._group.all_reduce(x.data_ptr(), x.numel(), _native.code(x))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        part = x.contiguous()
        gathered = torch.empty(self.num_ranks, *x.shape, dtype=x.dtype)
        with self._missed():
            self._group.all_gather(part.data_ptr(), gathered.data_ptr(), part.nbytes)
        return gathered

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        assert x.is_contiguous()
        assert 0 <= source < self.num_ranks
        with self._missed():
            self._group.broadcast(x.data_ptr(), x.nbytes, source)
        return x

    def barrier(self) -> None:
        with self._missed():
            self._group.barrier()

    @contextmanager
    def _missed(self) -> Iterator[None]:
        try:
            yield
        except self._peer_error as error:
            raise PeerError(f"{error}: start all {self.num_ranks} ranks of the group again") from None


@contextmanager
def new_group() -> Iterator[Path]:
    """A path for the ranks of a new group to join, in memory; the file goes away with the context."""
    directory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    file, name = tempfile.mkstemp(prefix="perilune-", dir=directory)
    os.close(file)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
