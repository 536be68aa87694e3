import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from perilune.cli import main
from perilune.cli.plan import plan_command
from perilune.errors import ConfigError, PeriluneError

app = typer.Typer()
app.command()(plan_command)


def run(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if isinstance(result.exception, PeriluneError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_configuration_alone_is_planned(fixtures_dir):
    config = fixtures_dir / "kimi-k3.1-pro" / "config.json"
    report = json.loads(run("--config", config, "--hardware", "mi355x", "--context", 1048576, "--json"))
    best = report["plans"][0]
    assert (best["engine"], best["placement"]["tp"], best["is_published"]) == ("ATOM", 8, True)
    assert best["stages"][0]["resident_bytes"] / 1e9 == pytest.approx(199, rel=0.01)
    assert best["longest_context"] == 1048576


def test_one_million_tokens_need_eight_a3_machines_in_the_published_layout(fixtures_dir):
    base = ["--config", fixtures_dir / "kimi-k3" / "config.json", "--hardware", "atlas-800i-a3", "--context", 1048576]
    published = [
        any(plan["is_published"] for plan in json.loads(run(*base, "--nodes", nodes, "--json"))["plans"])
        for nodes in (4, 8)
    ]
    assert published == [False, True]


def test_a_checkpoint_is_planned_for_this_machine(micro_checkpoint, tmp_path):
    text = run(micro_checkpoint, "--context", 64, "--plot", tmp_path / "plan.svg")
    assert f"perilune serve {micro_checkpoint} --dtype bfloat16 --max-model-len 64" in text
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_the_context_defaults_to_what_the_model_has(micro_checkpoint):
    report = json.loads(run(micro_checkpoint, "--json"))
    longest = json.loads((micro_checkpoint / "config.json").read_text())["text_config"]["max_position_embeddings"]
    assert report["question"]["context"] == min(131072, longest)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either a checkpoint directory or --config FILE"),
        (["--hardware", "mi999"], "--hardware is 'mi999'; allowed: this, "),
        (["--nodes", "-1"], "--nodes is -1; allowed for this: 1 to 1"),
        (["--context", "0"], "--context is 0; allowed: 1 to"),
        (["--concurrency", "-5"], "--concurrency is -5; allowed: 1 to 65536"),
        (["--concurrency", "65536", "--plot", "x.svg"], "--plot has nothing to draw"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(micro_checkpoint, args, message):
    with pytest.raises(ConfigError, match=message):
        run(*([micro_checkpoint, *args] if args else []))


def test_a_plot_needs_a_place(micro_checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="--plot cannot write"):
        run(micro_checkpoint, "--context", 64, "--plot", tmp_path / "absent" / "plan.svg")


def test_errors_end_with_code_2_and_a_message(micro_checkpoint, tmp_path, monkeypatch, capsys):
    for args in ([str(micro_checkpoint), "--hardware", "x"], ["--config", str(tmp_path / "absent.json")]):
        monkeypatch.setattr(sys, "argv", ["perilune", "plan", *args])
        with pytest.raises(SystemExit) as end:
            main.main()
        assert end.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")
