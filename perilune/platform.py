"""What this machine offers: memory, processors and their instruction sets. Linux only, imports no torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from perilune.errors import ConfigError

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that this process can still allocate, and what bounds them: the machine, or the file of a cgroup."""

    num_bytes: int
    bound: str


def free_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> FreeMemory:
    """What the machine has free, cut by every memory cgroup above this process, of either version."""
    free = FreeMemory(_meminfo_bytes(proc, "MemAvailable"), "the free memory of this machine")
    for directory, limit_file, usage_file in _memory_cgroups(proc, cgroup):
        limit = _read_integer(directory / limit_file)
        usage = _read_integer(directory / usage_file)
        if limit is not None and usage is not None:
            # the kernel gives inactive file pages back before it refuses an allocation
            left = max(0, limit - max(0, usage - _reclaimable_bytes(directory)))
            if left < free.num_bytes:
                free = FreeMemory(left, f"the memory cgroup ({directory / limit_file})")
    return free


def available_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes of `free_memory`."""
    return free_memory(proc, cgroup).num_bytes


def num_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0))


def largest_cache_bytes(directory: Path = CPU_CACHE) -> int:
    """Size of the processor's largest cache; 32 MiB where the system does not say."""
    units = {"K": 2**10, "M": 2**20}
    texts = [file.read_text().strip() for file in directory.glob("index*/size")]
    return max((int(text[:-1]) * units[text[-1]] for text in texts if text[-1:] in units), default=32 * 2**20)


@cache
def cpu_features(proc: Path = PROC) -> frozenset[str]:
    """Instruction-set names of the processor as the kernel spells them; empty where it does not list them."""
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def bfloat16_pays(proc: Path = PROC) -> bool:
    """Whether bfloat16 is clearly the faster compute dtype here.

    Tile instructions multiply it several times faster. AVX-512 alone gains on large matrices only and loses on the
    single-row products of a small model, so it does not count.
    """
    return "amx_bf16" in cpu_features(proc)


def _meminfo_bytes(proc: Path, key: str) -> int:
    path = proc / "meminfo"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); give the size of the cache yourself") from error
    for line in lines:
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{path} has no {key}; give the size of the cache yourself")


def _memory_cgroups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, str, str]]:
    """The memory cgroup of this process and its parents, each with the names of its limit and usage files."""
    try:
        entries = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            root, files = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            # inside a container the path may name directories of the host: those are absent and read as no limit
            yield root.joinpath(*parts[:depth]), *files


def _read_integer(path: Path) -> int | None:
    """The integer in a cgroup file; None where the file is absent or says there is no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable_bytes(directory: Path) -> int:
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(None, 1) for line in lines if " " in line)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))
