"""Sessions survive a restart of the server, and a directory that fails is no reason not to answer."""

import os
import re
import signal
import subprocess
import sys

import httpx
import openai
import pytest

DEADLINE_S = 60.0
HISTORY = [{"role": "user", "content": "Tell me of the sea, of ships, of sails and of the wind that fills them."}]


class Server:
    """A server of the tiny checkpoint with tiers, from `with` to its SIGTERM."""

    def __init__(self, checkpoint, kv_dir):
        self._command = [sys.executable, "-m", "perilune.cli.main", "serve", str(checkpoint), "--port", "0"]
        self._command += ["--max-model-len", "512", "--dtype", "float32", "--threads", "1"]
        self._command += ["--host-cache-bytes", "16M", "--kv-dir", str(kv_dir), "--kv-dir-bytes", "64M"]

    def __enter__(self):
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert match, self.process.stderr.read()
        self.url = match[0]
        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S)
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(DEADLINE_S) == 0
        finally:
            self.process.kill()
            self.process.stdout.close()
            self.process.stderr.close()

    def ask(self, messages):
        answer = self._client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, reasoning_effort="none"
        )
        return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens

    def metric(self, name, tier):
        line = f'perilune:{name}{{model_name="tiny",tier="{tier}"}} '
        (found,) = (text for text in httpx.get(f"{self.url}/metrics").text.splitlines() if text.startswith(line))
        return float(found.removeprefix(line))


def test_a_session_is_taken_up_after_a_restart_and_answers_the_same(tiny_checkpoint, tmp_path):
    with Server(tiny_checkpoint, tmp_path) as server:
        answer, num_cached = server.ask(HISTORY)
        assert num_cached == 0
    with Server(tiny_checkpoint, tmp_path) as server:
        again, num_cached = server.ask(HISTORY)
        assert again == answer
        assert num_cached > 16
        assert server.metric("prefix_cache_tier_hits_total", "disk") == num_cached
        assert server.metric("kv_tier_damaged_total", "disk") == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_directory_costs_the_hit_and_nothing_else(tiny_checkpoint, tmp_path):
    with Server(tiny_checkpoint, tmp_path) as server:
        answer, _ = server.ask(HISTORY)
    for path in tmp_path.rglob("*-*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size - 1)
    with Server(tiny_checkpoint, tmp_path) as server:
        assert server.ask(HISTORY) == (answer, 0)
        assert server.metric("kv_tier_damaged_total", "disk") > 0


@pytest.mark.parametrize("directory", ["/proc/nowhere"])
def test_a_directory_that_cannot_be_used_is_refused_at_start(tiny_checkpoint, directory):
    server = Server(tiny_checkpoint, directory)
    found = subprocess.run(server._command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert found.returncode == 2
    assert f"kv_dir is '{directory}', which cannot be used" in found.stderr
