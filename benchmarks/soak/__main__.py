"""A server under the worst of clients for as long as asked, then idle: every answer right, nothing lost, nothing kept.

    python -m benchmarks.soak --minutes 20
    python -m benchmarks.soak --minutes 5 --server-flags "--max-num-seqs 4 --num-blocks 40" --json

Starts `perilune serve` on a random checkpoint with a vision tower, with a cache so small that requests are set back.
Every request is first answered alone. Then 64 clients ask for the same requests at random, streamed or not, and half of
them leave early. Each answer that ends must equal the one it got alone, at temperature 0 and with a seed. When all are
gone, requests, blocks and slots must be back at nothing, and the memory where it was after a first tenth of the time.
Exits with 1, and says why, if anything is not so. Ctrl-C ends the clients early; what follows is still checked.
"""

import argparse
import asyncio
import json
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak.clients import TIMEOUT_S, Tally, run_alone, run_clients
from benchmarks.soak.jobs import KINDS, Job, make_jobs
from perilune.bench.serve.own_server import OwnServer, own_server
from perilune.cli.make_checkpoint import DEMO_RANK_FILE, write_random_checkpoint
from perilune.config.presets import NUM_CONTROL_IDS, preset_config
from perilune.text.rank_file import read_rank_file

SERVER_FLAGS = "--max-num-seqs 8 --num-blocks 40 --max-model-len 512 --image-cache-memory 64K --dtype float32"
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
}
IDLE_TIMEOUT_S = 120.0
REPORT_INTERVAL_S = 10.0
WARM_SHARE = 0.1
MEBIBYTE = 2**20
# what must be nothing when nobody asks
IDLE_GAUGES = ("num_requests_running", "num_requests_waiting", "num_blocks_used", "num_state_slots_used")


@dataclass
class Outcome:
    """What a soak found; `failures` say what is not as it must be."""

    seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    num_wrong: int = 0
    num_errors: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    rss_start_mib: float = 0.0
    rss_peak_mib: float = 0.0
    rss_end_mib: float = 0.0
    failures: list[str] = field(default_factory=list)


class Watch:
    """Looks at a server from outside: its metrics, and the memory of its processes."""

    def __init__(self, http: httpx.AsyncClient, server: OwnServer):
        self._http = http
        self._pid = server.process.pid
        self.peak_mib = 0.0

    async def metrics(self) -> dict[str, float]:
        """Sums over labels, without the prefix."""
        found: dict[str, float] = {}
        for line in (await self._http.get("/metrics")).text.splitlines():
            if not line.startswith("#"):
                name = line.split("{")[0].removeprefix("perilune:")
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    def rss_mib(self) -> float:
        """Resident memory of the server and its children."""
        total, pids = 0.0, [self._pid]
        while pids:
            pid = pids.pop()
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    pids += map(int, children.read_text().split())
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024
        self.peak_mib = max(self.peak_mib, total)
        return total

    async def wait_until_idle(self) -> dict[str, float]:
        """The gauges that are not back at nothing in time; empty when all are."""
        end_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            found = await self.metrics()
            busy = {name: found[name] for name in IDLE_GAUGES if found[name]}
            if not busy or time.monotonic() > end_s:
                return busy
            await asyncio.sleep(0.1)


async def soak(server: OwnServer, jobs: list[Job], options: argparse.Namespace) -> Outcome:
    """All of it against a running server."""
    outcome, tally = Outcome(), Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as http:
        watch = Watch(http, server)
        before = await run_alone(http, jobs, tally)
        seconds = options.minutes * 60

        def clients(share: float, seed: int) -> Any:
            options_of_run = {"num_clients": options.clients, "seconds": seconds * share, "seed": seed}
            return run_clients(http, jobs, before, tally, **options_of_run)

        await clients(WARM_SHARE, 1)
        outcome.failures += _busy(await watch.wait_until_idle(), "after the first tenth")
        outcome.rss_start_mib, began_s = watch.rss_mib(), time.monotonic()
        reporting = asyncio.create_task(_report(watch, tally, began_s))
        running = asyncio.create_task(clients(1 - WARM_SHARE, 2))
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()
        outcome.seconds = time.monotonic() - began_s
        reporting.cancel()
        outcome.failures += _busy(await watch.wait_until_idle(), "at the end")
        outcome.rss_end_mib, outcome.rss_peak_mib = watch.rss_mib(), watch.peak_mib
        after = await run_alone(http, jobs, tally)
        changed = [name for name, answer in before.items() if after[name] != answer]
        outcome.failures += [f"alone after the soak, {', '.join(changed)} are answered otherwise"] if changed else []
        metrics = await watch.metrics()
        health = await http.get("/health")
        outcome.failures += [] if health.status_code == 200 else [f"/health is {health.status_code}: {health.text}"]
    outcome.preemptions = int(metrics["num_preemptions_total"])
    outcome.cached_tokens = int(metrics["prefix_cache_hits_total"])
    outcome.generated_tokens = int(metrics["generation_tokens_total"])
    _judge(outcome, tally, options)
    return outcome


def _busy(gauges: dict[str, float], when: str) -> list[str]:
    return [f"{when}, {name} stays at {value:.0f}" for name, value in gauges.items()]


def _judge(outcome: Outcome, tally: Tally, options: argparse.Namespace) -> None:
    """Add to the failures what the figures tell."""
    outcome.finished, outcome.left = dict(tally.finished), dict(tally.left)
    outcome.num_wrong, outcome.num_errors = tally.num_wrong, tally.num_errors
    outcome.failures += [f"wrong answer: {text}" for text in tally.wrong]
    outcome.failures += [f"error: {text}" for text in tally.errors]
    if outcome.preemptions == 0:
        outcome.failures.append("no request was set back: the soak needs a smaller cache (--num-blocks)")
    if outcome.cached_tokens == 0:
        outcome.failures.append("no prompt found a beginning in the cache, though some have one in common")
    missing = [kind for kind in KINDS if not tally.finished[kind]]
    if missing or not tally.left:
        outcome.failures.append(f"too short: nothing finished of {missing}, {sum(tally.left.values())} left early")
    growth = outcome.rss_end_mib - outcome.rss_start_mib
    if growth > options.max_growth_mib:
        outcome.failures.append(f"memory grew by {growth:.0f} MiB; allowed are {options.max_growth_mib:.0f}")


async def _report(watch: Watch, tally: Tally, began_s: float) -> None:
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        rss = watch.rss_mib()
        print(
            f"{time.monotonic() - began_s:6.0f} s: {tally.finished.total()} finished, {tally.left.total()} left, "
            f"{tally.num_wrong} wrong, {tally.num_errors} errors, {rss:.0f} MiB",
            file=sys.stderr,
            flush=True,
        )


def render(outcome: Outcome) -> str:
    """The outcome for people."""
    lines = [f"{'kind':<10}{'finished':>10}{'left early':>12}"]
    lines += [f"{kind:<10}{outcome.finished.get(kind, 0):>10}{outcome.left.get(kind, 0):>12}" for kind in KINDS]
    lines += [
        "",
        f"{outcome.seconds:.0f} s: {outcome.num_wrong} wrong answers, {outcome.num_errors} errors that were not meant",
        f"{outcome.generated_tokens} tokens, {outcome.cached_tokens} of prompts cached, {outcome.preemptions} set back",
        f"memory {outcome.rss_start_mib:.0f} MiB, at the end {outcome.rss_end_mib:.0f}, max {outcome.rss_peak_mib:.0f}",
        *(f"FAILED: {text}" for text in outcome.failures),
    ]
    return "\n".join(lines)


def write_checkpoint(directory: Path) -> None:
    """Random weights with a vision tower and the demo's vocabulary."""
    vocab_size = len(read_rank_file(DEMO_RANK_FILE)) + NUM_CONTROL_IDS
    config = preset_config("tiny", "k31", has_vision=True, sizes={**SIZES, "vocab_size": vocab_size})
    write_random_checkpoint(directory, config, seed=1)


def main(arguments: list[str] | None = None) -> int:
    """Run a soak; the exit code is 0 only when everything was as it must be."""
    parser = argparse.ArgumentParser(description="A server under the worst of clients.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=6, help="different requests of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-flags", default=SERVER_FLAGS, help="options of perilune serve, as one text")
    parser.add_argument("--max-growth-mib", type=float, default=64.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory) / "soak")
        with own_server([f"{directory}/soak", *shlex.split(options.server_flags)]) as server:
            outcome = asyncio.run(soak(server, make_jobs("soak", options.jobs, options.seed), options))
        if server.process.returncode != 0:
            outcome.failures.append(f"the server ended with exit code {server.process.returncode}")
    print(json.dumps(asdict(outcome)) if options.json else render(outcome))
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
