import json

import pytest
import torch

from perilune import ops
from perilune.bench import case as bench_case
from perilune.bench import mixer_cases, row_cases, weight_cases
from perilune.bench import ops as bench_ops_module
from perilune.bench.case import BenchCase, rotated
from perilune.bench.ceilings import Work
from perilune.bench.ops import BUILDERS, LONGEST_REFERENCE_S, ReferenceClock, bench_ops
from perilune.bench.spread import Spread
from perilune.errors import ConfigError
from perilune.ops.case import tensors_in
from perilune.ops.registry import all_ops

SMALL = {
    "HIDDEN": 64,
    "HEADS": 2,
    "WIDTH": 32,
    "LATENT": 96,
    "INNER": 32,
    "NUM_EXPERTS": 8,
    "NUM_CHOSEN": 2,
    "TOKENS": (1, 4),
    "CONTEXTS": (64, 128),
    "_PROJECTION": 64,
    "_SHARED_INNER": 64,
    "_ROWS_PER_EXPERT": (1, 3),
    "_KV_RANK": 64,
    "_ROW": 128,
    "_TOPK": 32,
    "_INDEX_WIDTH": 32,
    "_PATCHES": (4, 12),
    "_TOWER_INNER": 32,
}


@pytest.fixture
def small_sizes(monkeypatch):
    for module in (mixer_cases, row_cases, weight_cases):
        for name, value in SMALL.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(bench_case, "largest_cache_bytes", lambda: 1024)
    monkeypatch.setattr("perilune.bench.ceilings.Ceilings.with_read_measured_again", lambda self: self)


@pytest.fixture
def quick(monkeypatch):
    """Every call is made, and takes a second."""

    def time_calls(calls, **_):
        for call in calls:
            call()
        return Spread(1.0, 1.0, 1.0)

    monkeypatch.setattr(bench_ops_module, "time_calls", time_calls)


@pytest.mark.parametrize("op", sorted(BUILDERS))
def test_every_case_runs(op, small_sizes, quick, ceilings, monkeypatch):
    monkeypatch.setattr(bench_ops_module, "LONGEST_REFERENCE_S", float("inf"))
    found = list(bench_ops([op], ceilings))
    assert {timing.op for timing in found} == {op}
    assert len({timing.case for timing in found}) == len(found) > 0
    assert all(timing.read_bytes > 0 and timing.seconds is not None for timing in found)
    json.dumps([timing.as_json() for timing in found], allow_nan=False)


def test_every_op_is_timed():
    ops.load_all()
    assert set(BUILDERS) == set(all_ops())


def test_an_op_that_does_not_exist_is_refused(ceilings):
    with pytest.raises(ConfigError, match="rms_norm"):
        list(bench_ops(["norm"], ceilings))


def test_copies_fill_the_cache_several_times(monkeypatch):
    monkeypatch.setattr(bench_case, "largest_cache_bytes", lambda: 1000)
    value = (torch.zeros(100, dtype=torch.uint8), [torch.zeros(25)])
    copies = rotated(value)
    assert len(copies) == 20
    assert len({tensor.data_ptr() for tensor in tensors_in(copies)}) == 40
    assert len(rotated(torch.zeros(1000))) == 1


def made(flops):
    return BenchCase("op", "", ((),), Work(1.0, flops))


def test_a_reference_that_would_take_too_long_is_left_out_and_said(monkeypatch, ceilings):
    """Ideal times are tens of milliseconds; those of the reference 1 s and 1 s for each."""
    taken = iter([2.0, 4.0])
    monkeypatch.setattr(bench_ops_module, "time_calls", lambda *_, **__: Spread(next(taken), 0.0, 9.0))
    clock = ReferenceClock(lambda: None, ceilings)
    assert clock.time(made(2e9)) == (2.0, "")
    assert clock.time(made(6e9)) == (4.0, "")
    assert clock.time(made(10e9)) == (None, "the reference would take about 6 s")
    assert clock.time(made(20e9)) == (None, "the reference would take about 11 s")


def test_the_second_case_of_a_reference_is_foreseen_from_half_of_the_first(monkeypatch, ceilings):
    monkeypatch.setattr(bench_ops_module, "time_calls", lambda *_, **__: Spread(2.0, 0.0, 9.0))
    clock = ReferenceClock(lambda: None, ceilings)
    assert clock.time(made(2e9)) == (2.0, "")
    assert clock.time(made(12e9)) == (None, f"the reference would take about {2 + 5:.0f} s")
    assert LONGEST_REFERENCE_S == 5.0


def test_the_share_is_that_of_the_bound_that_takes_longer(small_sizes, quick, ceilings):
    timing = next(timing for timing in bench_ops(["mxfp4_linear"], ceilings))
    assert timing.bound == "memory"
    assert timing.share == pytest.approx(timing.read_bytes / 1e10)
    cached = next(timing for timing in bench_ops(["rms_norm"], ceilings))
    assert (cached.bound, cached.share) == (None, None)
