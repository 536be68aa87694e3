"""`bench stream`: decoding from experts on disk by the size of their cache, beside what the disk can do at most.

Right before and after each run the disk alone: direct reads of experts' largest tensors in random order. The same model
with its files mapped, every page of an expert cold before each step, shows what page faults reach.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from perilune.bench.engine import BenchEngine
from perilune.bench.stream.disk import disk_rate, make_cold
from perilune.bench.stream.report import StreamReport, StreamRun
from perilune.checkpoint.streamed import find_experts
from perilune.config.engine import EngineConfig
from perilune.config.parse import load_model_config
from perilune.engine.build import load_model
from perilune.errors import CapacityError
from perilune.models.accounting import expert_floor_bytes, expert_slot_bytes, num_experts_total
from perilune.models.model import KimiModel
from perilune.ops.moe import ExpertPlaces

_WARM_UP_STEPS = 4
# of all experts, where no size is asked for
_SHARES = (0.0, 0.25, 0.5, 0.75)


def bench_stream(
    checkpoint: Path, config: EngineConfig, cache_sizes: Sequence[int], num_tokens: int, *, with_faults: bool
) -> StreamReport:
    """Time `num_tokens` steps with each cache; without sizes the floor and parts of all experts are taken."""
    model_config = load_model_config(checkpoint)
    places, total = find_experts(checkpoint, model_config), num_experts_total(model_config)
    slot_bytes, floor = expert_slot_bytes(model_config), expert_floor_bytes(model_config)
    sizes = cache_sizes or [max(floor, int(share * total) * slot_bytes) for share in _SHARES]
    runs = [_run_streamed(checkpoint, replace(config, expert_cache_bytes=size), places, num_tokens) for size in sizes]
    if with_faults:
        runs.append(_run_mapped(checkpoint, config, places, num_tokens))
    return StreamReport(str(checkpoint), total * slot_bytes, tuple(runs))


def _run_streamed(checkpoint: Path, config: EngineConfig, places: ExpertPlaces, num_tokens: int) -> StreamRun:
    model = load_model(checkpoint, config)
    stream = model.stream
    assert stream is not None
    engine = _started(model, config, num_tokens)
    for _ in range(_WARM_UP_STEPS):
        _step(engine)
    disk = disk_rate(places)
    before = stream.stats()
    seconds, peak = _timed(engine, num_tokens, lambda: None)
    after = stream.stats()
    read, uses = after.read_bytes - before.read_bytes, after.uses - before.uses
    waited_s = after.waited_s - before.waited_s
    return StreamRun(
        cache_bytes=stream.num_bytes,
        tokens_per_second=num_tokens / seconds,
        bytes_per_token=read / num_tokens,
        hit_rate=(after.hits - before.hits) / uses,
        early_rate=(after.early - before.early) / uses,
        read_rate=(after.waited_bytes - before.waited_bytes) / waited_s if waited_s else 0.0,
        waited_share=waited_s / seconds,
        overall_rate=read / seconds,
        disk_rate=max(disk, disk_rate(places)),
        peak_anonymous_bytes=peak,
    )


def _run_mapped(checkpoint: Path, config: EngineConfig, places: ExpertPlaces, num_tokens: int) -> StreamRun:
    model = load_model(checkpoint, replace(config, expert_cache_bytes=None))
    if model.stream is not None:
        raise CapacityError("--page-faults maps every expert, and memory holds too few of them here: leave it out")
    engine = _started(model, config, num_tokens)
    for _ in range(_WARM_UP_STEPS):
        _step(engine)
    disk = disk_rate(places)
    before = _read_bytes()
    seconds, peak = _timed(engine, num_tokens, lambda: make_cold(model, places))
    read = _read_bytes() - before
    disk = max(disk, disk_rate(places))
    return StreamRun(
        None, num_tokens / seconds, read / num_tokens, 0.0, 0.0, read / seconds, 1.0, read / seconds, disk, peak
    )


def _started(model: KimiModel, config: EngineConfig, num_tokens: int) -> BenchEngine:
    engine = BenchEngine(model, config, num_seqs=1, max_len=num_tokens + _WARM_UP_STEPS + 4)
    engine.add_behind("0", 0)
    return engine


def _step(engine: BenchEngine) -> None:
    engine.step_or_raise()
    engine.redraw_tokens()


def _timed(engine: BenchEngine, count: int, between: Callable[[], None]) -> tuple[float, int]:
    """Seconds of `count` steps without what is done between them, and the most anonymous memory held after one."""
    seconds, peak = 0.0, 0
    for _ in range(count):
        between()
        start = time.perf_counter()
        _step(engine)
        seconds += time.perf_counter() - start
        peak = max(peak, _anonymous_bytes())
    return seconds, peak


def _read_bytes() -> int:
    """What this process had the disk read so far."""
    return _field(Path("/proc/self/io"), "read_bytes")


def _anonymous_bytes() -> int:
    return _field(Path("/proc/self/status"), "RssAnon") * 1024


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(f"{file} lists no {name}")
