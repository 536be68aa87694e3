import json

import pytest
from typer.testing import CliRunner

from perilune.bench.drafts import run as bench
from perilune.bench.drafts.texts import KINDS
from perilune.bench.spread import Spread
from perilune.cli.main import app
from perilune.config.engine import DEMO_CHECKPOINT, EngineConfig
from perilune.errors import ConfigError

RUNS = 3


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(bench, "RUNS", RUNS)
    monkeypatch.setattr(bench, "LEAST_S", 0.0)


@pytest.mark.parametrize("speculative", ["ngram", "dspark"])
def test_every_text_is_answered_with_and_without_guesses(speculative):
    config = EngineConfig(speculative=speculative)
    heard = []
    runs = bench.DraftBench(DEMO_CHECKPOINT, config, num_tokens=24, max_batch=2).run((1, 2), heard.append)
    assert heard == runs
    assert [(run.kind, run.batch) for run in runs] == [(kind, batch) for kind in KINDS for batch in (1, 2)]
    for run in runs:
        assert run.num_pairs == RUNS
        assert run.num_differing == 0
        assert 0 < run.plain.low <= run.plain.median <= run.plain.high
        assert 0 < run.speculative.low <= run.speed_up.high * run.plain.high
        assert 0.0 <= run.plain_steps <= 1.0
        assert len(bench.render(run).split()) >= 8


def test_short_runs_are_repeated_for_long_enough(monkeypatch):
    monkeypatch.setattr(bench, "LEAST_S", 3600.0)
    monkeypatch.setattr(bench, "MOST_RUNS", 5)
    found = bench.DraftBench(DEMO_CHECKPOINT, EngineConfig(speculative="ngram"), num_tokens=8, max_batch=1)
    assert {run.num_pairs for run in found.run((1,), lambda _: None)} == {5}


def test_the_command_prints_a_table_or_one_object():
    arguments = ["bench", "decode", "--speculative", "ngram", "--tokens", "8", "--batch", "1"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["text", *KINDS]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [run["kind"] for run in found["runs"]] == list(KINDS)
    assert set(found["runs"][0]["speed_up"]) == {"median", "low", "high"}


def test_a_draft_that_is_not_there_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["bench", "decode", "--speculative", str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError)
    assert "is no directory" in str(result.exception)


def test_quartiles_pass_over_what_is_far_off():
    assert Spread.quartiles([1.0, 100.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0)
