"""Runs lm-eval against the server, through the chat API and through completions.

    python -m benchmarks.lm_eval --work-dir /tmp/lm-eval
    python -m benchmarks.lm_eval --work-dir /tmp/lm-eval --url http://127.0.0.1:8000

Installs the pinned lm-eval into an environment of its own below the work directory (no torch, 0.7 GB), serves the demo
model unless `--url` names a server, and asks held-out questions: answers written out through local-chat-completions and
local-completions, and one of four definitions chosen by its log-likelihood through local-completions. Nothing is
downloaded while it runs. Prints lm-eval's own tables; exits with 1 if it fails or a task gives no score.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lm_eval.tasks import TASKS, write_tasks

VERSION = "0.4.13"
NUM_AT_ONCE = 8
CHAT = ("local-chat-completions", "chat/completions")
COMPLETIONS = ("local-completions", "completions")
# which tasks go through which kind of model, with further arguments
RUNS = (
    (*CHAT, ("perilune_chat",), ("--apply_chat_template", "--gen_kwargs", "reasoning_effort=none")),
    (*COMPLETIONS, ("perilune_completion", "perilune_choice"), ()),
)


def install(directory: Path) -> Path:
    """An environment with lm-eval; returns its command."""
    command = directory / "venv" / "bin" / "lm_eval"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
        pip = directory / "venv" / "bin" / "pip"
        subprocess.run([pip, "install", "--quiet", f"lm-eval[api]=={VERSION}"], check=True)
    return command


@contextmanager
def served(url: str | None) -> Iterator[str]:
    """The address of the server; without one, of one that serves the demo meanwhile."""
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    command = [sys.executable, "-m", "perilune", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            match = re.search(r"http://[^/]+", process.stdout.readline())
            if match is None:
                raise SystemExit("the server did not start")
            yield match[0]
        finally:
            process.terminate()


def evaluate(command: Path, url: str, directory: Path) -> bool:
    """Run every task; whether each of them gave a score."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    # data sets are files beside the tasks; neither they nor anything else is to be looked for elsewhere
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    scored = set()
    for kind, route, tasks, more in RUNS:
        settings = f"model={model},base_url={url}/v1/{route},num_concurrent={NUM_AT_ONCE},max_length=4096"
        results = directory / "results" / kind
        arguments = ["--model", kind, "--model_args", settings, "--tasks", ",".join(tasks), "--include_path", directory]
        subprocess.run([command, "run", *arguments, *more, "--output_path", results], check=True, env=environment)
        newest = max(results.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
        scored |= json.loads(newest.read_text())["results"].keys()
    return scored == set(TASKS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--url", help="of a running server; the demo model is served otherwise")
    parser.add_argument("--questions", type=int, default=50, help="of each skill")
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    command = install(options.work_dir)
    tasks = options.work_dir / "tasks"
    write_tasks(tasks, options.questions)
    with served(options.url) as url:
        return 0 if evaluate(command, url, tasks) else 1


if __name__ == "__main__":
    sys.exit(main())
