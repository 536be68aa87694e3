"""What the disk reads at most in requests of an expert's size, and pages of a mapped file made cold."""

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator

from torch import Tensor

from perilune.models.model import KimiModel
from perilune.ops.case import tensors_in
from perilune.ops.moe import ExpertPlaces
from perilune.ops.moe.streamed import ALIGNMENT, NUM_READERS

_DISK_S = 2.0
_MADV_DONTNEED = 4


def disk_rate(places: ExpertPlaces) -> float:
    """Bytes a second of direct reads of an expert's largest tensor at random aligned places, by as many readers."""
    size = -(-int(places.places[..., 2].max()) // ALIGNMENT) * ALIGNMENT
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in places.files]
    done, until = [0] * NUM_READERS, time.monotonic() + _DISK_S

    def read(reader: int) -> None:
        memory, chosen = mmap.mmap(-1, size), random.Random(reader)
        while time.monotonic() < until:
            descriptor = chosen.choice(descriptors)
            last = max(0, os.fstat(descriptor).st_size - size) // ALIGNMENT
            done[reader] += os.preadv(descriptor, [memory], chosen.randint(0, last) * ALIGNMENT)

    start = time.monotonic()
    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(NUM_READERS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    for descriptor in descriptors:
        os.close(descriptor)
    return sum(done) / (time.monotonic() - start)


def make_cold(model: KimiModel, places: ExpertPlaces) -> None:
    """Take the experts' pages out of this process and out of the system's page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    for tensor in _expert_tensors(model):
        first = tensor.data_ptr() + -tensor.data_ptr() % mmap.PAGESIZE
        size = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_DONTNEED)
    descriptors = [os.open(file, os.O_RDONLY) for file in places.files]
    for file, begin, size in places.places.flatten(0, 2).tolist():
        os.posix_fadvise(descriptors[file], begin, size, os.POSIX_FADV_DONTNEED)
    for descriptor in descriptors:
        os.close(descriptor)


def _expert_tensors(model: KimiModel) -> Iterator[Tensor]:
    for layer in model.model.layers:
        if not layer.is_dense:
            yield from tensors_in(list(layer.block_sparse_moe.experts.table))
