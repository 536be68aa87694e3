import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from train.evaluate import EVALUATED_SKILLS, Messages, evaluate, held_out_questions, main, table
from train.split import FIRST_EVALUATION_SEED

SEED = FIRST_EVALUATION_SEED + 5


def answers_by_prompt(count: int) -> dict[str, str]:
    questions = [q for s in EVALUATED_SKILLS for q in held_out_questions(s, count, SEED, thinking=False)]
    return {json.dumps(question.messages): question.answer for question in questions}


@pytest.mark.parametrize("skill", EVALUATED_SKILLS)
def test_evaluation_asks_200_different_questions_that_depend_on_the_seed(skill: str):
    questions = held_out_questions(skill, 200, SEED, thinking=False)
    assert len({json.dumps(question.messages) for question in questions}) == 200
    assert questions == held_out_questions(skill, 200, SEED, thinking=False)
    assert questions != held_out_questions(skill, 200, SEED + 1, thinking=False)


def test_no_sum_is_asked_twice():
    assert len({question.answer for question in held_out_questions("sums", 200, SEED, thinking=False)}) == 200


def test_a_training_seed_is_refused():
    with pytest.raises(ValueError, match="seed 999999 belongs to training"):
        held_out_questions("sums", 1, 999_999, thinking=False)


def test_more_sums_than_were_held_out_are_refused():
    with pytest.raises(ValueError, match="held-out questions, 500 were asked for"):
        held_out_questions("sums", 500, SEED, thinking=False)


def test_only_exact_answers_count():
    right = answers_by_prompt(10)

    def generate(conversations: Sequence[Messages]) -> list[str]:
        answers = [f" {right[json.dumps(messages)]}\n" for messages in conversations]
        return ["", answers[1] + "and more", *answers[2:]]

    scores = evaluate(generate, seed=SEED, count=10)
    assert [(s.skill, s.asked, s.exact, s.rate) for s in scores] == [(s, 10, 8, 0.8) for s in EVALUATED_SKILLS]
    assert scores[0].misses[0].answer == ""
    assert "80.0%" in table(scores)


class AnsweringHandler(BaseHTTPRequestHandler):
    """A chat server that knows every answer, and remembers what it was asked."""

    answers: dict[str, str]
    requests: list[dict[str, object]]

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "demo"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        answer = self.answers[json.dumps(tuple(body["messages"]))]
        self._reply({"choices": [{"message": {"content": answer}}]})

    def _reply(self, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[AnsweringHandler]]]:
    class Handler(AnsweringHandler):
        answers = answers_by_prompt(6)
        requests: list[dict[str, object]] = []  # noqa: RUF012

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", Handler
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize(("thinking", "effort"), [("off", "none"), ("on", "low")])
def test_a_server_is_asked_at_temperature_0_and_its_figures_are_stored(
    server: tuple[str, type[AnsweringHandler]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    thinking: str,
    effort: str,
):
    url, handler = server
    report = tmp_path / "report.json"
    arguments = ["--url", url, "--questions", "6", "--seed", str(SEED), "--thinking", thinking, "--json", str(report)]
    assert main(arguments) == 0
    assert "100.0%" in capsys.readouterr().out
    stored = json.loads(report.read_text())
    assert (stored["model"], stored["seed"], stored["thinking"]) == ("demo", SEED, thinking)
    assert [(s["skill"], s["exact"], s["rate"]) for s in stored["scores"]] == [(s, 6, 1.0) for s in EVALUATED_SKILLS]
    assert len(handler.requests) == 18
    assert all(r["temperature"] == 0 and r["reasoning_effort"] == effort for r in handler.requests)


def test_an_absent_server_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]):
    assert main(["--url", "http://127.0.0.1:9", "--questions", "1"]) == 2
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--skills", "sums,poetry"], "unknown poetry; allowed: dictionary, sums, recall"),
        (["--seed", "7"], "--seed 7 belongs to training"),
        (["--questions", "0"], "ask at least one"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
