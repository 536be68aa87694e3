"""Every example of docs/serving.md is run as it stands, against servers started as it says; answers must be alike."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"
EXAMPLE = re.compile(r"```sh\n(.*?)```\n(?:```(json|text)\n(.*?)```\n)?", re.DOTALL)
SERVER = re.compile(r"^perilune (serve .*)&$", re.MULTILINE)
PORT = re.compile(r"--port (\d+)")
DEFAULT_PORT = "8000"
# words of the APIs, which frames of a stream are told apart by
TELLING = ("type", "finish_reason", "role", "object", "name")

NEEDED = ("bash", "curl", "jq")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the examples need {', '.join(MISSING)}")


@dataclass(frozen=True)
class Example:
    """Commands of the page, and the answer that is printed below them."""

    line: int
    commands: str
    kind: str
    answer: str


def examples() -> list[Example]:
    text = PAGE.read_text()
    return [
        Example(text.count("\n", 0, match.start()) + 2, match[1], match[2] or "", match[3] or "")
        for match in EXAMPLE.finditer(text)
    ]


class Reader:
    """Someone who follows the page: a directory, and the servers that were started so far."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._ports: dict[str, str] = {}
        self._servers: list[subprocess.Popen[str]] = []
        self._environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(self, commands: str) -> str:
        """What the commands print; servers among them are started, each on some free port instead of its own."""
        first = SERVER.search(commands)
        printed = self._shell(commands if first is None else commands[: first.start()])
        started = [self._start(match[1]) for match in SERVER.finditer(commands)]
        for port, server in started:
            assert server.stdout is not None
            ready = server.stdout.readline()
            match = re.search(r"http://127\.0\.0\.1:(\d+)", ready)
            assert match, f"the server said {ready!r}"
            self._ports[port] = match[1]
        return printed

    def stop(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.communicate()

    def _start(self, arguments: str) -> tuple[str, subprocess.Popen[str]]:
        port = PORT.search(arguments)
        command = [sys.executable, "-m", "perilune", *PORT.sub("", arguments).split(), "--port", "0"]
        command += ["--threads", "1", "--cache-memory", "64M"]
        server = subprocess.Popen(command, cwd=self._directory, stdout=subprocess.PIPE, text=True)
        self._servers.append(server)
        return DEFAULT_PORT if port is None else port[1], server

    def _shell(self, commands: str) -> str:
        def address(match: re.Match[str]) -> str:
            return f"127.0.0.1:{self._ports[match[1]]}"

        script = "set -eo pipefail\n" + re.sub(r"127\.0\.0\.1:(\d+)(?=/)", address, commands)
        done = subprocess.run(
            ["bash", "-c", script], cwd=self._directory, env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> Iterator[dict[int, str]]:
    """What each example prints, by its line; they are run in the order of the page, which builds on it."""
    reader = Reader(tmp_path_factory.mktemp("reader"))
    try:
        yield {example.line: reader.run(example.commands) for example in examples()}
    finally:
        reader.stop()


def documents(text: str) -> list[Any]:
    """The JSON documents that stand one after another in a text."""
    found, decoder = [], json.JSONDecoder()
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found


def check_alike(shown: Any, given: Any, place: str = "") -> None:
    """Same keys, same types, and the same words but for what the page leaves open by an ellipsis."""
    if isinstance(shown, dict):
        assert isinstance(given, dict), place
        assert shown.keys() == given.keys(), place
        for key in shown:
            check_alike(shown[key], given[key], f"{place}.{key}")
    elif isinstance(shown, list) and not (shown and isinstance(shown[0], int | float)):
        assert isinstance(given, list), place
        assert len(shown) == len(given), place
        for index, items in enumerate(zip(shown, given, strict=True)):
            check_alike(*items, f"{place}[{index}]")
    elif isinstance(shown, str):
        assert isinstance(given, str), place
        assert re.fullmatch(".*".join(map(re.escape, shown.split("…"))), given, re.DOTALL), f"{place}: {given}"
    elif isinstance(shown, int | float) and not isinstance(shown, bool):
        assert isinstance(given, int | float), place
        assert not isinstance(given, bool), place
    elif not isinstance(shown, list):
        assert shown == given, place


def frames(text: str) -> list[str]:
    """The kinds of a stream's frames or lines, neighbours of one kind counted once."""
    parts = text.strip().split("\n\n" if "data: {" in text else "\n")
    kinds = [json.dumps([_kind(line) for line in part.splitlines()]) for part in parts]
    return [kind for kind, _ in groupby(kinds)]


def _kind(line: str) -> Any:
    try:
        return _outline(json.loads(line.removeprefix("data: ")))
    except ValueError:
        return line


def _outline(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _outline(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_outline(item) for item in value[:1]]
    return value if key in TELLING or value == "" else type(value).__name__


@pytest.mark.parametrize(
    "example", [example for example in examples() if example.kind], ids=lambda example: f"line {example.line}"
)
def test_an_example_answers_as_the_page_shows(printed: dict[int, str], example: Example) -> None:
    if example.kind == "json":
        check_alike(documents(example.answer), documents(printed[example.line]))
    else:
        assert frames(printed[example.line]) == frames(example.answer)


def test_every_example_of_a_server_is_run() -> None:
    """No request stands on the page in a form that is not checked."""
    rest = EXAMPLE.sub("", PAGE.read_text())
    assert "curl" not in rest
    assert all(example.kind for example in examples() if "curl" in example.commands)
