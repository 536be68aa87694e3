"""Sums among two processes of this machine: the native core's shared memory beside torch's gloo, in one run."""

import multiprocessing
import tempfile
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from perilune.errors import EngineError
from perilune.parallel.communicator import SharedMemoryCommunicator, new_group

NUM_RANKS = 2
# A row of the hidden size 7168 in bfloat16, as one decoded token sums it, and what a piece of a prompt sums.
SIZES = (14 * 1024, 1 << 20)
ROUNDS, REPEATS, WARM_UP = 20, 25, 5
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SumTiming:
    """One size of float32: seconds of one sum, the least and the median over all."""

    num_bytes: int
    shared_memory_s: float
    shared_memory_least_s: float
    gloo_s: float
    gloo_least_s: float

    @property
    def ratio(self) -> float:
        """How often the core's sum goes into gloo's, by medians."""
        return self.gloo_s / self.shared_memory_s

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def bench_sums() -> list[SumTiming]:
    """Starts two processes and times their sums, both ways in turns; raises EngineError where one fails."""
    spawn = multiprocessing.get_context("spawn")
    with new_group() as path, tempfile.TemporaryDirectory() as directory:
        ours, theirs = spawn.Pipe(duplex=False)
        store = str(Path(directory) / "store")
        ranks = [spawn.Process(target=_run_rank, args=(rank, path, store, theirs)) for rank in range(NUM_RANKS)]
        for process in ranks:
            process.start()
        theirs.close()
        try:
            found: list[SumTiming] = ours.recv()
        except EOFError:
            raise EngineError("a rank of the measurement ended before its result; its message stands above") from None
        finally:
            for process in ranks:
                process.join(_TIMEOUT_S)
                process.kill()
    return found


def _run_rank(rank: int, path: Path, store: str, link: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    group = SharedMemoryCommunicator(path, rank, NUM_RANKS, timeout_s=_TIMEOUT_S)
    found = [_time_sums(group, num_bytes) for num_bytes in SIZES]
    if rank == 0:
        link.send(found)
    link.close()
    dist.destroy_process_group()


def _time_sums(group: SharedMemoryCommunicator, num_bytes: int) -> SumTiming:
    x = torch.zeros(num_bytes // 4)
    own: list[float] = []
    gloo: list[float] = []
    for _ in range(ROUNDS):
        for times, add in ((own, group.all_reduce), (gloo, dist.all_reduce)):
            for index in range(WARM_UP + REPEATS):
                begin = perf_counter()
                add(x)
                if index >= WARM_UP:
                    times.append(perf_counter() - begin)
    return SumTiming(num_bytes, median(own), min(own), median(gloo), min(gloo))
