import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from perilune.errors import ConfigError, PeerError
from perilune.ops import _native
from perilune.parallel.communicator import LocalCommunicator, SharedMemoryCommunicator, new_group

pytestmark = pytest.mark.skipif(_native.absence() is not None, reason="no native core")

SPAWN = multiprocessing.get_context("spawn")
# Short where a peer is to be missed, ample where all come.
PATIENT, IMPATIENT = 120.0, 3.0
SLOT_BYTES = 1024  # so that larger tensors go by in pieces


def values(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Of sizes that differ, so that the order of a sum shows in its bits."""
    random = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    return (random * torch.logspace(-3, 3, count)).to(dtype)


def in_order(num_ranks: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    total = values(0, dtype, count).float()
    for rank in range(1, num_ranks):
        total = total + values(rank, dtype, count).float()
    return total.to(dtype)


def exchange(path: Path, rank: int, num_ranks: int, link: Connection) -> None:
    """Every call at several sizes; sends back what a plain computation does not agree with."""
    group = SharedMemoryCommunicator(path, rank, num_ranks, timeout_s=PATIENT, slot_bytes=SLOT_BYTES)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 7, 256, 257, 5000):
            for _ in range(3):
                if not torch.equal(group.all_reduce(values(rank, dtype, count)), in_order(num_ranks, dtype, count)):
                    wrong.append(("all_reduce", dtype, count))
            gathered = group.all_gather(values(rank, dtype, count))
            if not torch.equal(gathered, torch.stack([values(r, dtype, count) for r in range(num_ranks)])):
                wrong.append(("all_gather", dtype, count))
            for source in range(num_ranks):
                if not torch.equal(group.broadcast(values(rank, dtype, count), source), values(source, dtype, count)):
                    wrong.append(("broadcast", dtype, count))
    group.barrier()
    link.send(wrong)


def add_for_ever(path: Path, rank: int, num_ranks: int, link: Connection) -> None:
    """Adds until a peer is missed, and sends back the error twice: a group that ended stays so."""
    group = SharedMemoryCommunicator(path, rank, num_ranks, timeout_s=PATIENT)
    link.send("joined")
    try:
        while True:
            group.all_reduce(torch.ones(3584))
    except PeerError as error:
        first = str(error)
    with pytest.raises(PeerError, match="was missed before"):
        group.barrier()
    link.send(first)


def add_and_wait_briefly(path: Path, rank: int, num_ranks: int, link: Connection) -> None:
    """As above; waits briefly for a peer, but long for all to join."""
    with_all = SharedMemoryCommunicator(path, rank, num_ranks, timeout_s=PATIENT)
    group = SharedMemoryCommunicator(Path(f"{path}-b"), rank, num_ranks, timeout_s=IMPATIENT)
    with_all.barrier()
    link.send("joined")
    try:
        while True:
            group.all_reduce(torch.ones(3584))
    except PeerError as error:
        link.send(str(error))


class Group:
    """Processes that run one function as the ranks of a group."""

    def __init__(self, path: Path, num_ranks: int, run) -> None:
        pipes = [SPAWN.Pipe() for _ in range(num_ranks)]
        self.links = [ours for ours, _ in pipes]
        self.processes = [
            SPAWN.Process(target=run, args=(path, rank, num_ranks, pipe[1])) for rank, pipe in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def hear(self, rank: int):
        assert self.links[rank].poll(PATIENT), f"rank {rank} says nothing"
        return self.links[rank].recv()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def start():
    groups = []
    with new_group() as path:

        def start(num_ranks, run):
            groups.append(Group(path, num_ranks, run))
            return groups[-1]

        yield start
        for group in groups:
            group.end()
        Path(f"{path}-b").unlink(missing_ok=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_gets_the_sum_in_the_order_of_ranks_to_the_bit(start, num_ranks):
    group = start(num_ranks, exchange)
    assert [group.hear(rank) for rank in range(num_ranks)] == [[]] * num_ranks


def test_the_sum_in_another_order_has_other_bits():
    first, second, third = (values(rank, torch.float32, 5000) for rank in range(3))
    assert not torch.equal((first + second) + third, first + (second + third))


def test_a_killed_peer_is_missed_by_all(start):
    group = start(3, add_for_ever)
    assert [group.hear(rank) for rank in range(3)] == ["joined"] * 3
    os.kill(group.processes[1].pid, signal.SIGKILL)
    for message in (group.hear(0), group.hear(2)):
        assert message.startswith(("rank 1 ended", "rank 1 was missed by rank"))
        assert "start all 3 ranks of the group again" in message


def test_a_frozen_peer_is_missed_after_the_time_out(start):
    group = start(2, add_and_wait_briefly)
    assert [group.hear(rank) for rank in range(2)] == ["joined"] * 2
    os.kill(group.processes[1].pid, signal.SIGSTOP)
    assert group.hear(0).startswith("rank 1 did not come in time")


def test_a_peer_that_never_joins_is_missed():
    with new_group() as path, pytest.raises(PeerError, match="rank 1 did not come in time while the group of 2 ranks"):
        SharedMemoryCommunicator(path, 0, 2, timeout_s=0.2)


def test_a_rank_joins_once():
    with new_group() as path:
        first = SharedMemoryCommunicator(path, 0, 1, timeout_s=PATIENT)
        with pytest.raises(ConfigError, match="rank 0 cannot join"):
            SharedMemoryCommunicator(path, 0, 1, timeout_s=PATIENT)
        assert torch.equal(first.all_reduce(torch.ones(3)), torch.ones(3))


def test_a_group_without_a_place_or_a_rank_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        SharedMemoryCommunicator(tmp_path / "absent" / "group", 0, 1, timeout_s=PATIENT)
    with pytest.raises(ConfigError, match="rank is 2; allowed: 0 to 1"):
        SharedMemoryCommunicator(tmp_path / "group", 2, 2, timeout_s=PATIENT)


def test_the_file_of_a_group_goes_away():
    with new_group() as path:
        SharedMemoryCommunicator(path, 0, 1, timeout_s=PATIENT)
        assert path.exists()
    assert not path.exists()


def test_bfloat16_rounds_once_and_keeps_what_is_not_a_number():
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3e38, 1e-40], dtype=torch.bfloat16)
    with new_group() as path:
        alone = SharedMemoryCommunicator(path, 0, 1, timeout_s=PATIENT)
        got = alone.all_reduce(special.clone())
    assert torch.equal(got[1:].view(torch.int16), special[1:].view(torch.int16))
    assert got[0].isnan()


def test_one_rank_alone_exchanges_nothing():
    alone, x = LocalCommunicator(), torch.arange(3.0)
    alone.barrier()
    assert alone.all_reduce(x) is x
    assert alone.broadcast(x, 0) is x
    assert torch.equal(alone.all_gather(x), x.unsqueeze(0))
