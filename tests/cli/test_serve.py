"""`perilune serve` from end to end: a checkpoint, a process, the official client."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import typer
from typer.testing import CliRunner

from perilune.cli.serve import serve_command
from perilune.errors import ConfigError

DEADLINE_S = 60.0
TURNS = [{"role": "user", "content": "hello"}]


@dataclass
class Served:
    process: subprocess.Popen
    ready_line: str
    url: str
    client: openai.OpenAI

    def gauges(self):
        lines = [line for line in httpx.get(f"{self.url}/metrics").text.splitlines() if line[0] != "#"]
        return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.fixture(scope="module")
def start(tiny_checkpoint):
    """Start servers; `flags` go to the command."""
    started = []

    def serve(*flags):
        command = [sys.executable, "-m", "perilune.cli.main", "serve", str(tiny_checkpoint), "--port", "0"]
        command += ["--max-num-seqs", "4", "--num-blocks", "64", "--max-model-len", "512", "--dtype", "float32"]
        command += ["--threads", "1", "--drain-timeout", "20", "--log-format", "json", *flags]
        environment = {**os.environ, "PERILUNE_API_KEY": "k"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert match, process.stderr.read()
        client = openai.OpenAI(base_url=f"{match[0]}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S)
        return Served(process, line, match[0], client)

    yield serve
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(params=["--engine-process", "--no-engine-process"])
def served(start, request):
    return start(request.param)


def engine_pid(served):
    lists = Path(f"/proc/{served.process.pid}/task").glob("*/children")
    (pid,) = [int(pid) for children in lists for pid in children.read_text().split()]
    return pid


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_server_outlives_the_crash_of_its_engine(start):
    served = start()
    fields = {"model": "tiny", "messages": TURNS, "temperature": 0, "reasoning_effort": "none"}
    expected = served.client.chat.completions.create(**fields, max_tokens=12).choices[0].message.content
    with served.client.chat.completions.create(**fields, max_tokens=400, stream=True) as stream:
        next(iter(stream))
        os.kill(engine_pid(served), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="killed by SIGKILL and is being restarted"):
            list(stream)
    health = httpx.get(f"{served.url}/health")
    assert health.status_code == 503
    with pytest.raises(openai.InternalServerError, match="being restarted; try again later"):
        served.client.chat.completions.create(**fields)
    wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200)
    assert served.client.chat.completions.create(**fields, max_tokens=12).choices[0].message.content == expected
    assert served.gauges()["perilune:engine_restarts_total"] == 1
    pid = engine_pid(served)
    served.process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())


def test_a_checkpoint_is_served_from_start_to_stop(served):
    client = served.client
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == ("tiny", 512)
    assert served.ready_line == f"tiny is served at {served.url}/v1 (context 512 tokens)\n"

    fields = {"model": "tiny", "messages": TURNS, "max_tokens": 12, "temperature": 0, "reasoning_effort": "none"}
    whole = client.chat.completions.create(**fields, logprobs=True)
    assert whole.usage.completion_tokens == 12
    assert len(whole.choices[0].logprobs.content) <= 12
    texts = []

    def ask():
        stream = client.chat.completions.create(**fields, stream=True)
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [whole.choices[0].message.content] * 16

    with client.chat.completions.create(**{**fields, "max_tokens": 400}, stream=True) as stream:
        next(iter(stream))
    deadline = time.monotonic() + DEADLINE_S
    while (gauges := served.gauges())["perilune:num_requests_running"]:
        assert time.monotonic() < deadline
    assert gauges["perilune:num_requests_waiting"] == 0
    assert gauges["perilune:num_blocks_free"] == gauges["perilune:num_blocks_total"] == 64
    assert gauges["perilune:num_state_slots_free"] == gauges["perilune:num_state_slots_total"] == 4 + 4 * 4

    stream = client.chat.completions.create(**{**fields, "max_tokens": 40}, stream=True)
    next(iter(stream))
    served.process.send_signal(signal.SIGTERM)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop"), "answers in progress finish"
    assert served.process.wait(DEADLINE_S) == 0
    lines = [json.loads(line) for line in served.process.stderr.read().splitlines()]
    assert {line["level"] for line in lines} == {"info"}
    own = [line["message"] for line in lines if not line["request_id"]]
    assert own[0].startswith("start-up plan: ")
    assert all(message.startswith("  ") for message in own[1:]), "the parts of the plan"


def test_a_taken_port_is_known_before_a_model_is_loaded(tmp_path):
    app = typer.Typer()
    app.command()(serve_command)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, [str(tmp_path / "absent"), "--port", str(port)])
    assert isinstance(result.exception, ConfigError)
    assert f"port {port}" in str(result.exception)
    assert "--port" in str(result.exception)
