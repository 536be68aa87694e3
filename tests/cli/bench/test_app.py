import json

import pytest
from typer.testing import CliRunner

from perilune.bench.ceilings import Ceilings
from perilune.bench.ops import OpTiming
from perilune.bench.spread import Spread
from perilune.cli.bench import app as bench
from perilune.ops import _native

CEILINGS = Ceilings("wide", 2, {1: Spread(1e10, 9e9, 1.1e10)}, 2e11, 0.0, 4e11)
FAST = OpTiming("situ", "one row", "native", Spread(2e-5, 1e-5, 3e-3), 1e5, 1e6, 1e10, "memory", 0.5, 1e-3, "")
LEFT_OUT = OpTiming("situ", "many", "reference", None, 1e5, 1e6, 1e10, None, None, None, "would take about 9 s")


@pytest.fixture
def run(monkeypatch):
    asked = []

    def timings(names, ceilings):
        asked.append(tuple(names))
        return iter([FAST, LEFT_OUT])

    monkeypatch.setattr("perilune.bench.ceilings.measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr("perilune.bench.ops.bench_ops", timings)

    def invoke(*arguments):
        result = CliRunner().invoke(bench.app, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout, asked

    return invoke


def test_the_table_shows_ceilings_and_one_line_per_case(run):
    out, asked = run("ops", "--op", "situ", "--op", "rms_norm")
    assert asked == [("situ", "rms_norm")]
    assert "GFLOP/s: float32 200, bfloat16 none, int8 400" in out
    fast, left_out, _, others = out.splitlines()[-4:]
    assert others.startswith("processors that others used meanwhile: ")
    assert "20 us (10 us-3 ms)" in fast
    assert fast.split()[-3:] == ["50%", "memory", "50.0"]
    assert left_out.endswith("would take about 9 s")


def test_json_holds_ceilings_and_cases(run):
    out, asked = run("ops", "--json")
    report = json.loads(out)
    assert asked == [()]
    assert report["ceilings"]["read"] == 1e10
    first, second = report["ops"]
    assert (first["median_s"], first["times_faster_than_reference"]) == (2e-5, pytest.approx(50))
    assert (second["median_s"], second["note"]) == (None, "would take about 9 s")


@pytest.mark.skipif(_native.absence() is not None, reason=str(_native.absence()))
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["decode", "--context", "40", "--tokens", "2", "--batch", "2"], {"context": 40, "tokens": 2, "batch": 2}),
        (["prefill", "--tokens", "20", "--repeats", "1"], {"context": 0, "tokens": 20, "batch": 1}),
        (
            ["decode", "--tokens", "1", "--dense-weights", "int8", "--activations", "int8", "--dtype", "float32"],
            {"dense_weights": "int8", "activations": "int8", "dtype": "float32"},
        ),
        (
            ["decode", "--context", "70", "--tokens", "1", "--cache-dtype", "int8", "--index-cache-dtype", "mxfp4"],
            {"context": 70, "cache_dtype": "int8", "index_cache_dtype": "mxfp4"},
        ),
        (["prefill", "--tokens", "5", "--repeats", "1", "--cache-dtype", "fp8"], {"cache_dtype": "fp8"}),
    ],
    ids=" ".join,
)
def test_a_model_is_timed_with_the_settings_given(run, monkeypatch, micro_checkpoint, arguments, expected):
    monkeypatch.setattr(Ceilings, "read_again", lambda self: [2e10, 3e10, 4e10])
    command, *options = arguments
    out, _ = run(command, str(micro_checkpoint), "--json", *options)
    report = json.loads(out)
    assert {key: report[key] for key in expected} == expected
    assert report["tokens_per_second"] > 0
    assert report["ceilings"]["read"] == report["read_ceiling"] == report["reads"]["median"] == 3e10
