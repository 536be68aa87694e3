import json

import pytest
from typer.testing import CliRunner

from perilune.bench.parallel.sums import SumTiming
from perilune.cli.bench import app as bench

TIMING = SumTiming(14336, 5e-6, 4e-6, 3.5e-4, 2e-4)


@pytest.fixture(autouse=True)
def timed(monkeypatch):
    monkeypatch.setattr("perilune.bench.parallel.sums.bench_sums", lambda: [TIMING])


def test_a_line_has_both_ways_and_their_ratio():
    result = CliRunner().invoke(bench.app, ["comm"])
    assert result.exit_code == 0, result.output
    assert "14336" in result.output
    assert "5.0 (4.0)" in result.output
    assert "350.0 (200.0)    70.0" in result.output


def test_json_is_one_object():
    result = CliRunner().invoke(bench.app, ["comm", "--json"])
    found = json.loads(result.output)
    assert found["sums"] == [TIMING.as_json()]
    assert found["others_cores"] >= 0
