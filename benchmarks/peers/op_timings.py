"""Times llama.cpp's operations one by one at the dimensions of Kimi K3."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.machine import exclusive, read_bandwidth, wait_until_idle
from benchmarks.peers.measure import measure
from benchmarks.peers.package import WorkDir

GROUPS = ("experts", "matvec", "dense", "mla", "kda", "indexer")
_FIGURES = ("op", "repack", "threads", "ms", "ms_min", "ms_max", "runs", "gflop_per_s", "gb_per_s")


def time_ops(
    work: WorkDir, threads: int, seconds: float, groups: tuple[str, ...], lock: Path | None
) -> list[dict[str, Any]]:
    """One record per case; each names the share of CPU that others used during its group."""
    records: list[dict[str, Any]] = []
    for group in groups:
        with exclusive(lock):
            wait_until_idle(60.0)
            bandwidth = read_bandwidth(work.probe, threads)
            measured = measure([str(work.ops), str(threads), str(seconds), group])
        for line in measured.stdout.splitlines():
            record = json.loads(line)
            record |= {"others_cores": measured.others_cores, "read_gb_per_s": bandwidth / 1e9}
            records.append(record)
            print(_row(record), file=sys.stderr, flush=True)
    return records


def render(records: list[dict[str, Any]]) -> str:
    """One line per case."""
    return "\n".join(_row(record) for record in records)


def _row(record: dict[str, Any]) -> str:
    details = ", ".join(f"{k} {v}" for k, v in record.items() if k not in (*_FIGURES, "others_cores", "read_gb_per_s"))
    repack = "repacked" if record["repack"] else "as stored"
    note = f"  DISTURBED {record['others_cores']:.2f}" if record["others_cores"] > 0.05 else ""
    return (
        f"{record['op']:22} {details:42} {repack:10} {record['threads']} threads"
        f" {record['ms']:9.3f} ms ({record['ms_min']:.3f}-{record['ms_max']:.3f})"
        f" {record['gflop_per_s']:7.1f} GFLOP/s {record['gb_per_s']:6.2f} GB/s{note}"
    )
