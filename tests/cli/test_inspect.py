import json

import pytest
import typer
from typer.testing import CliRunner

from perilune.cli.inspect import inspect_command
from perilune.errors import CheckpointError, ConfigError, PeriluneError

app = typer.Typer()
app.command()(inspect_command)


def run(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if isinstance(result.exception, PeriluneError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_k3_gives_the_published_numbers(fixtures_dir):
    report = json.loads(run("--config", fixtures_dir / "kimi-k3" / "config.json", "--json"))
    expected = {
        "tensors": 497220,
        "total_size": 1560860324864,
        "parameters_total": 2779484476000,
        "parameters_active": 104189612640,
        "parameters_vision": 447358976,
        "cache_bytes_per_token": 27648,
        "state_bytes_per_sequence": 449372160,
    }
    assert {key: report[key] for key in expected} == expected
    assert sum(part["tensors"] for part in report["parts"].values()) == 497220


def test_k31_gives_the_published_numbers(fixtures_dir):
    report = json.loads(run("--config", fixtures_dir / "kimi-k3.1-pro" / "config.json", "--json"))
    assert (report["parameters_total"], report["cache_bytes_per_token"]) == (2779663002208, 33792)


def test_a_checkpoint_is_reported_as_stored(micro_checkpoint):
    report = json.loads(run(micro_checkpoint, "--json"))
    listed = json.loads((micro_checkpoint / "model.safetensors.index.json").read_text())
    assert report["tensors"] == len(listed["weight_map"])
    assert report["total_size"] == listed["metadata"]["total_size"]
    assert report["files"] == 5


def test_the_table_for_people_shows_every_part_and_total(micro_checkpoint):
    report, text = json.loads(run(micro_checkpoint, "--json")), run(micro_checkpoint)
    assert "Kimi K3.1 Pro layout: 2 KDA and 2 full attention layers, 1 dense and 3 MoE" in text
    assert all(part in text and f"{values['bytes']:,}" in text for part, values in report["parts"].items())
    assert f"{report['state_bytes_per_sequence']:,}" in text
    assert "All headers of 5 file(s) agree" in text


def test_a_damaged_checkpoint_is_refused(micro_checkpoint, tmp_path):
    import shutil

    copy = shutil.copytree(micro_checkpoint, tmp_path / "copy")
    shard = copy / "model-00002-of-000005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-000005\.safetensors has \d+ bytes"):
        run(copy)


def test_one_source_is_needed(micro_checkpoint):
    with pytest.raises(ConfigError, match="either a checkpoint directory or --config FILE"):
        run()
    with pytest.raises(ConfigError, match="and not both"):
        run(micro_checkpoint, "--config", micro_checkpoint / "config.json")


def test_precision_tells_for_every_matrix_what_holds_it_without_rounding(micro_checkpoint):
    report = json.loads(run(micro_checkpoint, "--precision", "--json"))
    experts = [tensor for tensor in report["tensors"] if tensor["stored"] == "mxfp4"]
    assert experts
    for tensor in experts:
        fits = tensor["row_spread"] <= 14
        assert (tensor["targets"]["e4m3fn"]["channel"]["num_rounded"] == 0) or not fits
        assert tensor["targets"]["int8"]["group"]["num_rounded"] == 0
    counted = sum(group["tensors"] for group in report["summary"].values())
    assert counted == len(report["tensors"]) == len({tensor["name"] for tensor in report["tensors"]})
    text = run(micro_checkpoint, "--precision")
    assert all(pattern in text for pattern in report["summary"])
    assert "lossless" in text


def test_precision_needs_weights(fixtures_dir):
    with pytest.raises(ConfigError, match="--precision reads weights"):
        run("--config", fixtures_dir / "kimi-k3" / "config.json", "--precision")
