"""`python -m benchmarks.peers`: perilune and llama.cpp side by side on one machine. See README.md."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import op_timings, package, report
from benchmarks.peers.convert import convert
from benchmarks.peers.engines import JOBS, USUAL_JOBS, VARIANTS
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.side_by_side import Plan, run_side_by_side

NUM_CORES = len(os.sched_getaffinity(0))


def main() -> int:
    """Parse the command line and do what it says; the exit code."""
    arguments = _parser().parse_args()
    # to be ended is to be interrupted: what was measured until then is still reported
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = package.WorkDir(arguments.work_dir.resolve())
    if arguments.command == "build":
        package.build(work, arguments.jobs)
        return 0
    if arguments.command == "convert":
        convert(work, arguments.checkpoint)
        return 0
    if arguments.command == "ops":
        records = op_timings.time_ops(
            work, arguments.threads, arguments.seconds, tuple(arguments.groups), arguments.lock
        )
        print(op_timings.render(records))
        _write(arguments.json, {"machine": describe_machine(), "ops": records})
        return 0
    return _run(work, arguments)


def _run(work: package.WorkDir, arguments: argparse.Namespace) -> int:
    plan = Plan(
        work,
        arguments.checkpoint,
        arguments.perilune,
        tuple(arguments.jobs),
        tuple(arguments.variants),
        arguments.repetitions,
        arguments.threads,
        arguments.lock,
        arguments.idle_limit,
    )
    results = run_side_by_side(plan)
    print(report.render(results.readings, plan.variants))
    disturbed = sorted({r.figure for r in results.readings if r.is_disturbed and r.figure != report.PEAK_MEMORY})
    if disturbed:
        print(f"disturbed at times: {'; '.join(disturbed)}")
    for failure in results.failures:
        print(f"failed: {failure.splitlines()[0]}")
    summary = report.summary(results.readings, plan.variants[0])
    machine = describe_machine() | {"llama_cpp_python": package.VERSION, "threads": plan.threads}
    _write(arguments.json, {"machine": machine, **summary, "commands": results.commands, "failures": results.failures})
    return 1 if results.failures else 0


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--work-dir", type=Path, required=True, help="holds the package, its build and GGUF files")
        return sub

    build = command("build", "Download llama-cpp-python and build its llama.cpp natively.")
    build.add_argument("--jobs", type=int, default=NUM_CORES)
    for_convert = command("convert", "Convert a K3 checkpoint to GGUF and check that the experts are the same bits.")
    for_convert.add_argument("checkpoint", type=Path)
    run = command("run", "Run the engines alternately and print their figures and ratios.")
    run.add_argument("checkpoint", type=Path)
    run.add_argument("--jobs", nargs="+", choices=[job.name for job in JOBS], default=list(USUAL_JOBS))
    run.add_argument("--variants", nargs="+", choices=VARIANTS, default=["llama.cpp", "perilune"], help="first: base")
    run.add_argument("--repetitions", type=int, default=5)
    run.add_argument("--perilune", type=Path, default=Path(sys.executable).with_name("perilune"))
    run.add_argument("--idle-limit", type=float, default=60.0, help="wait so many seconds for an idle machine")
    ops = command("ops", "Time llama.cpp's operations at K3's dimensions.")
    ops.add_argument("--groups", nargs="+", choices=op_timings.GROUPS, default=list(op_timings.GROUPS))
    ops.add_argument("--seconds", type=float, default=1.0, help="least time spent on each case")
    for sub in (run, ops):
        sub.add_argument("--threads", type=int, default=NUM_CORES)
        sub.add_argument("--json", type=Path, help="write everything measured to this file")
        sub.add_argument("--lock", type=Path, help="hold this file's lock during each measurement")
    return parser


if __name__ == "__main__":
    sys.exit(main())
