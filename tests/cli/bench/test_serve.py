import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from perilune.cli.bench.serve import bench_serve_command
from perilune.errors import ConfigError


def invoke(*arguments):
    app = typer.Typer()
    app.command()(bench_serve_command)
    return CliRunner().invoke(app, arguments)


def test_a_server_is_started_loaded_and_ended(tiny_checkpoint):
    settings = ["--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--turns", "2", "--tool-len", "5"]
    flags = "--max-num-seqs 2 --num-blocks 64 --max-model-len 256 --dtype float32 --threads 1"
    result = invoke(str(tiny_checkpoint), *settings, "--goodput", "e2el:1e6", "--server-flags", flags, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["completed"], found["total_output_tokens"], found["model_id"]) == (6, 24, "tiny")
    assert found["total_input_tokens"] == 3 * (20 + 20 + 4 + 5)
    assert found["request_goodput"] == found["request_throughput"]


def test_a_running_server_is_loaded_and_figures_are_shown(serve):
    server = serve(lambda request: [65] * request.params.max_tokens)
    result = invoke("--url", server.url, "--num-prompts", "2", "--output-len", "3")
    assert result.exit_code == 0, result.output
    assert "2 completed, 0 failed" in result.stdout
    assert "to the first token (TTFT)" in result.stdout
    assert "2 of 2 requests ended" in result.stderr


def test_nothing_answered_is_exit_code_1(serve):
    server = serve(lambda request: [65] * (request.params.max_tokens if len(request.prompt_token_ids) == 8 else 1))
    result = invoke("--url", server.url, "--num-prompts", "2")
    assert (result.exit_code, "2 failed" in result.stdout) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "x"], "--model is x.*--url"),
        (["--api-key", "x"], "--api-key.*--url"),
        (["DIR", "--url", "x"], "CHECKPOINT is DIR.*no --url"),
        (["--server-flags", "x", "--url", "x"], "--server-flags.*no --url"),
        (["--num-prefixes", "2"], "--num-prefixes is 2.*--prefix-len"),
        (["--tool-len", "2"], "--tool-len is 2.*--turns above 1"),
        (["--tool-pause", "2"], "--tool-pause.*--turns above 1"),
        (["--text-file", "x", "--vocab-size", "5"], "--vocab-size is 5.*--text-file"),
        (["--server-flags", "'"], "quote it as a shell would"),
        (["--goodput", "x"], "--goodput is 'x'"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--request-rate", "-1"], "request_rate is -1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_refused_before_anything_starts(arguments, words):
    error = invoke(*arguments).exception
    assert isinstance(error, ConfigError)
    assert re.search(words, str(error)), error


def test_a_server_that_does_not_start_is_an_error(tmp_path):
    error = invoke(str(tmp_path / "absent")).exception
    assert isinstance(error, ConfigError)
    assert "exit code 2 before it was ready" in str(error)


def test_a_bench_that_is_terminated_ends_its_server(tiny_checkpoint, tmp_path):
    command = [sys.executable, "-m", "perilune", "bench", "serve", str(tiny_checkpoint), "--num-prompts", "100000"]
    command += ["--server-flags", "--num-blocks 64 --max-model-len 256 --dtype float32 --threads 1"]
    with (tmp_path / "said").open("w+") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        lists = Path(f"/proc/{process.pid}/task").glob
        while not (children := [pid for path in lists("*/children") for pid in path.read_text().split()]):
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 143
    (server,) = children
    assert not Path(f"/proc/{server}").exists()
