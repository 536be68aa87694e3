"""What the disk reads at most in requests of an expert's size, and pages of a mapped file made cold."""

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.checkpoint.mapped import LargePages
from perilune.models.model import KimiModel
from perilune.ops.case import tensors_in
from perilune.ops.moe import ExpertPlaces
from perilune.ops.moe.streamed import ALIGNMENT, NUM_READERS

_DISK_S = 1.0
_READERS = (NUM_READERS, 2 * NUM_READERS, 4 * NUM_READERS)
_MADV_DONTNEED = 4
_BUFFER_BYTES = 8 << 20


def disk_rate(places: ExpertPlaces) -> float:
    """Bytes a second of direct reads of experts' largest tensors in random order: the best number of readers counts."""
    return max(_rate(places, num_readers) for num_readers in _READERS)


def _rate(places: ExpertPlaces, num_readers: int) -> float:
    flat = places.places.flatten(0, 2)
    largest = flat[flat[:, 2] == flat[:, 2].max()].tolist()
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in places.files]
    done, until = [0] * num_readers, time.monotonic() + _DISK_S

    def read(reader: int) -> None:
        # in small pages a request would be cut into many, at half the rate
        pages = LargePages(_BUFFER_BYTES * -(-(largest[0][2] + 2 * ALIGNMENT) // _BUFFER_BYTES))
        memory = pages.take(largest[0][2] + 2 * ALIGNMENT, dtype=torch.uint8).numpy()
        chosen = random.Random(reader)
        while time.monotonic() < until:
            file, begin, size = chosen.choice(largest)
            first, last = begin // ALIGNMENT, -(-(begin + size) // ALIGNMENT)
            room = memoryview(memory)[: (last - first) * ALIGNMENT]
            done[reader] += os.preadv(descriptors[file], [room], first * ALIGNMENT)

    start = time.monotonic()
    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(num_readers)]
    for each in readers:
        each.start()
    for each in readers:
        each.join()
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
