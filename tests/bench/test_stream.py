"""The table of `bench stream`: what it measures adds up."""

import json

import pytest
from typer.testing import CliRunner

from perilune.bench.stream.report import StreamReport, StreamRun, render_stream
from perilune.bench.stream.run import bench_stream
from perilune.cli.main import app
from perilune.config.engine import EngineConfig
from perilune.engine.build import load_model
from perilune.errors import CapacityError
from perilune.ops import _native

needs_core = pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))


def test_the_share_of_the_disk_is_that_of_its_rate_beside_the_run():
    run = StreamRun(2_000_000_000, 1.5, 8e8, 0.25, 0.5, 9e8, 0.9, 1.2e9, 1e9, 3_000_000_000)
    faults = StreamRun(None, 0.5, 1e9, 0.0, 0.0, 5e8, 1.0, 5e8, 1.25e9, 10**9)
    text = render_stream(StreamReport("DIR", 5_000_000_000, (run, faults)))
    first, second = (line.split() for line in text.splitlines()[2:])
    assert first == ["2.00", "GB", "1.500", "0.800", "25%", "50%", "90%", "0.90", "1.00", "90%", "3.00", "GB"]
    assert second[:3] == ["page", "faults", "0.500"]
    assert second[-3] == "40%"


@needs_core
def test_every_size_and_page_faults_are_measured(micro_checkpoint):
    given = ["bench", "stream", str(micro_checkpoint), "--cache", "1M", "--cache", "200K", "--tokens", "3", "--json"]
    result = CliRunner().invoke(app, [*given, "--page-faults"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    large, small, faults = found["runs"]
    assert (large["hit_rate"] > small["hit_rate"]) or small["hit_rate"] == 1.0
    assert small["cache_bytes"] <= 200 * 1024
    assert faults["cache_bytes"] is None
    assert all(run["disk_rate"] > 0 for run in found["runs"])


@needs_core
def test_a_cache_below_the_floor_is_refused(micro_checkpoint):
    result = CliRunner().invoke(app, ["bench", "stream", str(micro_checkpoint), "--cache", "1K"])
    assert result.exit_code != 0
    assert "give at least" in str(result.exception)


@needs_core
def test_page_faults_are_not_measured_where_experts_would_be_streamed(micro_checkpoint, monkeypatch):
    config = EngineConfig(expert_cache_bytes=2**20)
    streamed = load_model(micro_checkpoint, config)
    monkeypatch.setattr("perilune.bench.stream.run.load_model", lambda checkpoint, config: streamed)
    with pytest.raises(CapacityError, match="--page-faults maps every expert"):
        bench_stream(micro_checkpoint, config, [2**20], 1, with_faults=True)
