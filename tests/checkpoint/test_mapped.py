import mmap
import re
from pathlib import Path

import torch

from perilune.checkpoint.mapped import LargePages, MappedFile
from perilune.checkpoint.safetensors import read_header


def resident_bytes(file):
    """Bytes of a mapped file that this process has in memory."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    own = [block for block in blocks if str(file) in block.split("\n", 1)[0]]
    return sum(1024 * int(re.search(r"^Rss:\s+(\d+) kB", block, re.MULTILINE)[1]) for block in own)


def test_released_pages_leave_the_process_and_come_back_when_read(tmp_path):
    from safetensors.torch import save_file

    tensors = {name: torch.arange(1 << 20, dtype=torch.float32) + at for at, name in enumerate("ab")}
    save_file(tensors, tmp_path / "some.safetensors")
    entries = read_header(tmp_path / "some.safetensors")
    file = MappedFile(tmp_path / "some.safetensors")
    file.prefetch(entries["a"])
    found = {name: file.tensor(entry) for name, entry in entries.items()}
    assert all(torch.equal(found[name], tensors[name]) for name in "ab")
    before = resident_bytes(tmp_path / "some.safetensors")
    assert before >= sum(entry.num_bytes for entry in entries.values())
    file.release(entries["b"])
    assert before - resident_bytes(tmp_path / "some.safetensors") >= entries["b"].num_bytes - 2 * mmap.PAGESIZE
    assert torch.equal(found["b"], tensors["b"])


def test_a_tensor_within_one_page_may_be_released_too(micro_checkpoint):
    (file,) = micro_checkpoint.glob("model-00001*.safetensors")
    mapped = MappedFile(file)
    for entry in read_header(file).values():
        before = mapped.tensor(entry).clone()
        mapped.release(entry)
        assert torch.equal(mapped.tensor(entry), before)


def test_large_pages_give_tensors_that_lie_apart_and_begin_at_cache_lines():
    sizes = [(5, 7), (1,), (64, 64), (3, 33)]
    pages = LargePages(sum(LargePages.room(torch.Size(size).numel()) for size in sizes))
    taken = [pages.take(*size, dtype=torch.int8) for size in sizes]
    for value, tensor in enumerate(taken):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in taken] == [[0], [1], [2], [3]]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in taken)
    assert [tuple(tensor.shape) for tensor in taken] == sizes
