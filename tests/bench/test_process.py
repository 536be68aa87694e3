import multiprocessing
import os

import pytest
import torch

from perilune import ops
from perilune.bench import process
from perilune.bench.process import NativeClock, OthersClock, forget_peak_memory, peak_memory_bytes
from perilune.ops.recording import Arena, record, replay


def _growth_of_the_peak(held_bytes):
    torch.ones(64 << 20, dtype=torch.uint8).sum()
    forget_peak_memory()
    before = peak_memory_bytes()
    held = torch.ones(held_bytes, dtype=torch.uint8)
    return peak_memory_bytes() - before, int(held[-1])


def test_the_peak_is_that_of_what_was_held_since_it_was_forgotten():
    """In a process of its own: one with a past has memory to give without growing."""
    held_bytes = 48 << 20
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        growth, _ = pool.apply(_growth_of_the_peak, (held_bytes,))
    assert growth >= held_bytes * 0.9


def test_the_clock_counts_time_inside_the_native_core_and_leaves_it_as_it_was(native_core):
    x, weight = torch.randn(256, 1024), torch.ones(1024)
    before = dict(vars(native_core))
    clock = NativeClock()
    with clock.running():
        ops.rms_norm(x, weight, 1e-5)
        first = clock.seconds
        torch.randn(1000).sort()
        assert clock.seconds == first > 0
        ops.rms_norm(x, weight, 1e-5)
        assert clock.seconds > first
    assert vars(native_core) == before
    second = clock.seconds
    ops.rms_norm(x, weight, 1e-5)
    assert clock.seconds == second


def test_the_clock_tells_the_calls_of_a_replay_apart(native_core):
    x, weight = torch.randn(256, 1024), torch.ones(1024)
    recording = record(lambda: ops.add_rows(ops.rms_norm(x, weight, 1e-5), x), Arena())
    before, clock = dict(vars(native_core)), NativeClock()
    with clock.running():
        replay(recording.program)
    assert set(clock.by_function) == {"rms_norm", "add_rows"}
    assert clock.seconds > 0
    assert vars(native_core) == before


def test_an_error_inside_leaves_the_core_as_it_was(native_core):
    before = dict(vars(native_core))
    with pytest.raises(ValueError, match="stop"), NativeClock().running():
        raise ValueError("stop")
    assert vars(native_core) == before


def test_what_others_use_is_told_apart_from_ones_own(monkeypatch, tmp_path):
    """Two processors for ten seconds: one and a half used, one of them by this process."""
    tick, times = os.sysconf("SC_CLK_TCK"), {"monotonic": 0.0, "process_time": 0.0}
    for name in times:
        monkeypatch.setattr(process.time, name, lambda name=name: times[name])
    monkeypatch.setattr(process, "_PROC", tmp_path)
    (tmp_path / "stat").write_text("cpu 0 0 0 0 0 0 0 0 0 0\n")
    others = OthersClock()
    times |= {"monotonic": 10.0, "process_time": 10.0}
    (tmp_path / "stat").write_text(f"cpu {8 * tick} {2 * tick} {3 * tick} {5 * tick} {2 * tick} {tick} {tick} 0 0 0\n")
    assert others.cores() == pytest.approx(0.5)
