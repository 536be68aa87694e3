"""Memory of whole pages: files mapped to be read, and large pages to be filled."""

import mmap
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from perilune.checkpoint.safetensors import TensorEntry

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
# Tensors begin at multiples of a cache line.
_ALIGNMENT = 64


class MappedFile:
    """One file of tensors, mapped read-only."""

    def __init__(self, file: Path):
        with file.open("rb") as stream:
            self._pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        _ask_for_large_pages(self._pages)
        with warnings.catch_warnings():
            # torch warns that writing would be undefined; a writable private mapping would count against commit limits.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def tensor(self, entry: TensorEntry) -> Tensor:
        """A read-only tensor that shares the file's pages, or a copy where it is misaligned."""
        raw, dtype = self._bytes[entry.begin : entry.end], TORCH_DTYPES[entry.dtype]
        if entry.begin % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def prefetch(self, entry: TensorEntry) -> None:
        """Has the system begin to read a tensor."""
        first = entry.begin - entry.begin % mmap.PAGESIZE
        self._pages.madvise(mmap.MADV_WILLNEED, first, entry.end - first)

    def release(self, entry: TensorEntry) -> None:
        """Takes a tensor's pages out of this process; they are read again if it is."""
        first = entry.begin + -entry.begin % mmap.PAGESIZE
        if first < entry.end:
            self._pages.madvise(mmap.MADV_DONTNEED, first, entry.end - first)


class LargePages:
    """Room for tensors in pages of 2 MiB where the system has them: they fill and read faster than small ones."""

    def __init__(self, num_bytes: int):
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _ask_for_large_pages(pages)
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self._used = 0

    @staticmethod
    def room(num_bytes: int) -> int:
        """Bytes that a tensor of `num_bytes` takes."""
        return num_bytes + -num_bytes % _ALIGNMENT

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An unfilled tensor."""
        first, size = self._used, torch.Size(shape).numel() * dtype.itemsize
        self._used += self.room(size)
        return self._bytes[first : first + size].view(dtype).view(shape)


def _ask_for_large_pages(pages: mmap.mmap) -> None:
    """Weights read up to a third faster from them. What the system reads of a file from now on comes in large pages."""
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
