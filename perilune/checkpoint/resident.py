"""Reads tensors into memory past the system's page cache, in parallel, with a bar that shows bytes per second."""

import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from perilune.checkpoint.mapped import TORCH_DTYPES, LargePages
from perilune.checkpoint.safetensors import TensorEntry
from perilune.errors import CheckpointError

_BLOCK_BYTES = 8 << 20
_NUM_READERS = 4
# Neighbours in the file are read together, and so is what lies between them if it is less than this.
_GAP_BYTES = 64 << 10


@dataclass
class _Run:
    """Tensors that lie together in a file; [begin, end) covers them in whole pages."""

    file: Path
    begin: int
    end: int
    entries: list[TensorEntry]

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def resident_bytes(entries: Iterable[TensorEntry]) -> int:
    """Memory that `read_tensors` takes for these tensors."""
    return sum(run.num_bytes for run in _runs(entries))


def read_tensors(entries: Iterable[TensorEntry]) -> dict[str, Tensor]:
    """Stored name -> tensor, in anonymous memory. Raises CheckpointError where a file cannot be read to its end."""
    runs = list(_runs(entries))
    pages = LargePages(sum(run.num_bytes for run in runs))
    rooms = [pages.take(run.num_bytes, dtype=torch.uint8) for run in runs]
    bar = tqdm(
        total=sum(run.num_bytes for run in runs), unit="B", unit_scale=True, desc="weights", disable=None, leave=False
    )
    with bar, ThreadPoolExecutor(_NUM_READERS) as pool:
        blocks = (block for run, room in zip(runs, rooms, strict=True) for block in _blocks(run, room))
        for num_bytes in pool.map(lambda block: _read(*block), blocks):
            bar.update(num_bytes)
    return {entry.name: _view(entry, run, room) for run, room in zip(runs, rooms, strict=True) for entry in run.entries}


def _runs(entries: Iterable[TensorEntry]) -> Iterator[_Run]:
    current: _Run | None = None
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.begin)):
        begin = entry.begin - entry.begin % mmap.PAGESIZE
        end = entry.end + -entry.end % mmap.PAGESIZE
        if current is not None and entry.file == current.file and begin <= current.end + _GAP_BYTES:
            current.end = max(current.end, end)
            current.entries.append(entry)
            continue
        if current is not None:
            yield current
        current = _Run(entry.file, begin, end, [entry])
    if current is not None:
        yield current


def _blocks(run: _Run, room: Tensor) -> Iterator[tuple[Path, int, int, memoryview]]:
    """File, first byte, bytes that must come, and the memory for them."""
    needed = max(entry.end for entry in run.entries)
    memory = memoryview(room.numpy())
    for begin in range(run.begin, run.end, _BLOCK_BYTES):
        end = min(run.end, begin + _BLOCK_BYTES)
        yield run.file, begin, min(end, needed) - begin, memory[begin - run.begin : end - run.begin]


def _read(file: Path, begin: int, needed: int, memory: memoryview) -> int:
    try:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system in memory
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < needed:
                count = os.preadv(descriptor, [memory[done:]], begin + done)
                done += count
                if done < needed and (count == 0 or count % mmap.PAGESIZE):
                    raise CheckpointError(
                        f"{file} ends before byte {begin + needed}: it was cut off, download it again"
                    )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{file}: reading at byte {begin} failed: {error.strerror}") from None
    return len(memory)


def _view(entry: TensorEntry, run: _Run, room: Tensor) -> Tensor:
    raw, dtype = room[entry.begin - run.begin : entry.end - run.begin], TORCH_DTYPES[entry.dtype]
    if entry.begin % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(entry.shape)
