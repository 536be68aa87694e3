"""Runs the engines alternately on the same checkpoint and collects their figures."""

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import FIRST_OUTPUT, JOBS, VARIANTS, Command, Job, Variant
from benchmarks.peers.machine import exclusive, read_bandwidth, read_into_page_cache, wait_until_idle
from benchmarks.peers.measure import CommandFailed, measure
from benchmarks.peers.package import WorkDir
from benchmarks.peers.report import PEAK_MEMORY, Reading

# of one command, until one is not disturbed
ATTEMPTS = 3


@dataclass(frozen=True)
class Plan:
    """What to run."""

    work: WorkDir
    checkpoint: Path
    perilune: Path
    jobs: tuple[str, ...]
    variants: tuple[str, ...]
    repetitions: int
    threads: int
    lock: Path | None
    idle_limit_s: float


@dataclass
class Results:
    """Every reading, and the record of the command behind it."""

    readings: list[Reading] = field(default_factory=list)
    commands: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One command of one engine in one repetition."""

    job: Job
    variant_name: str
    command: Command
    repetition: int

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.variant_name]


def run_side_by_side(plan: Plan) -> Results:
    """Run every repetition of every job, the engines in turn and each second time in the other order."""
    results = Results()
    for step in _steps(plan):
        print(f"{step.repetition + 1}: {step.job.name}, {step.variant_name} ...", file=sys.stderr, flush=True)
        try:
            _run_step(plan, step, results)
        except CommandFailed as failure:
            results.failures.append(f"{step.job.name}, {step.variant_name}: {failure}")
            print(failure, file=sys.stderr)
        except KeyboardInterrupt:
            results.failures.append("interrupted: the rest is missing")
            break
    return results


def _steps(plan: Plan) -> Iterator[Step]:
    for repetition in range(plan.repetitions):
        for job in (job for job in JOBS if job.name in plan.jobs):
            if job.most_repetitions is not None and repetition >= job.most_repetitions:
                continue
            for name in plan.variants if repetition % 2 == 0 else reversed(plan.variants):
                for command in job.llama if VARIANTS[name].engine == "llama" else job.perilune:
                    yield Step(job, name, command, repetition)


def _run_step(plan: Plan, step: Step, results: Results) -> None:
    """Run the command, again if it was disturbed; the last attempt's figures count."""
    for attempt in range(ATTEMPTS):
        readings = _attempt(plan, step, results)
        if not any(reading.is_disturbed for reading in readings):
            break
        print(f"   disturbed (attempt {attempt + 1})", file=sys.stderr)
    results.readings += readings


def _attempt(plan: Plan, step: Step, results: Results) -> list[Reading]:
    arguments, model = _fill_in(plan, step)
    if not model.exists():
        raise CommandFailed(f"{model} is not there; llama.cpp's files are made by `convert`")
    with exclusive(plan.lock):
        read_into_page_cache(model)
        is_idle = wait_until_idle(plan.idle_limit_s)
        bandwidth = read_bandwidth(plan.work.probe, plan.threads)
        last_core = max(os.sched_getaffinity(0))
        measured = measure(arguments, last_core if step.job.has_neighbour else None)
    values = {}
    for figure, key in step.command.figures.items():
        value = measured.first_output_s if key == FIRST_OUTPUT else measured.json()[key]
        if value is None:
            raise CommandFailed(f"no output: {shlex.join(arguments)}")
        values[figure] = float(value)
    peak = step.command.peak_bytes
    values[PEAK_MEMORY] = (measured.max_rss_bytes if peak is None else measured.json()[peak]) / 1e9
    is_disturbed = measured.is_disturbed or not is_idle
    record = asdict(measured) | {
        "command": shlex.join(arguments),
        "job": step.job.name,
        "variant": step.variant_name,
        "repetition": step.repetition,
        "read_gb_per_s": bandwidth / 1e9,
        "figures": values,
        "is_disturbed": is_disturbed,
    }
    results.commands.append(record)
    told = ", ".join(f"{figure} {number:.3g}" for figure, number in values.items())
    around = f"memory reads {bandwidth / 1e9:.1f} GB/s, others used {measured.others_cores:.2f} cores"
    print(f"   {told}; {around}", file=sys.stderr, flush=True)
    name, repetition = step.variant_name, step.repetition
    return [Reading(figure, name, repetition, number, is_disturbed) for figure, number in values.items()]


def _fill_in(plan: Plan, step: Step) -> tuple[list[str], Path]:
    """The command line, and the file or directory it reads the weights from."""
    paths = {kind: str(plan.work.gguf(plan.checkpoint, kind)) for kind in ("q8", "bf16")}
    options = {name: text.format_map(paths) for name, text in step.variant.options.items()}
    places = {
        "bin": str(plan.work.bin),
        "steps": str(plan.work.steps),
        "states": str(plan.work.root / "states" / f"{plan.checkpoint.resolve().name}-{step.variant_name}"),
        "perilune": str(plan.perilune),
        "checkpoint": str(plan.checkpoint),
        "threads": str(plan.threads),
    }
    line = step.command.line.format_map(places | options)
    model = Path(options["gguf"]) if "gguf" in options else plan.checkpoint
    return shlex.split(line), model
