"""The running server: readiness, a taken port, and a shutdown that lets answers finish or tells them why not."""

import socket
import threading

import httpx
import pytest

from perilune.engine.client import ModelInfo
from perilune.engine.fake import FakeEngine
from perilune.errors import ConfigError
from perilune.server.app import create_app
from perilune.server.process import Server, bind
from perilune.server.settings import ServerSettings
from tests.server.conftest import DEADLINE_S, MODEL_NAME


class Process:
    """A server in a thread; `stop` asks it to end as a signal does."""

    def __init__(self, tokenizer, *, delay_s, drain_timeout_s):
        model = ModelInfo(MODEL_NAME, 512, tokenizer.vocab_size, tokenizer.eos_token_ids, 0)
        token_ids = tokenizer.encode("hello" * 4)
        self.engine = FakeEngine(model, lambda request: token_ids, delay_s=delay_s)
        bound = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        ready = threading.Event()
        app = create_app(self.engine, tokenizer, ServerSettings(drain_timeout_s=drain_timeout_s))
        self.server = Server(app, bound, drain_timeout_s, ready.set)
        bound.listen()
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [bound]})
        self.thread.start()
        assert ready.wait(DEADLINE_S)

    def stop(self, *, at_once=False):
        self.server.should_exit = True
        self.server.force_exit = at_once
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("delay_s", "drain_timeout_s", "at_once", "finishes"),
    [(0.05, 30.0, False, True), (2.0, 0.1, False, False), (2.0, 30.0, True, False)],
)
def test_shutdown_lets_answers_finish_or_says_why_not(
    tokenizer, is_stream, delay_s, drain_timeout_s, at_once, finishes
):
    process = Process(tokenizer, delay_s=delay_s, drain_timeout_s=drain_timeout_s)
    answers = []

    def ask():
        body = {"model": MODEL_NAME, "prompt": "x", "stream": is_stream}
        answers.append(httpx.post(f"{process.url}/v1/completions", json=body, timeout=DEADLINE_S))

    client = threading.Thread(target=ask)
    client.start()
    while process.engine.stats().num_running == 0:
        threading.Event().wait(0.005)
    process.stop(at_once=at_once)
    client.join()
    (answer,) = answers
    if finishes:
        assert answer.status_code == 200
        assert "shutting down" not in answer.text
    else:
        assert "the server is shutting down" in answer.text
    assert process.engine.stats().num_running == 0
    assert process.engine.check_health() == "the engine is stopped"


def test_a_taken_port_is_an_error_that_names_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {port}.*--port"):
            bind("127.0.0.1", port)


def test_a_port_that_was_taken_while_the_model_loaded_is_an_error_too(tokenizer):
    model = ModelInfo(MODEL_NAME, 512, tokenizer.vocab_size, tokenizer.eos_token_ids, 0)
    app = create_app(FakeEngine(model, lambda request: [65]), tokenizer, ServerSettings())
    first = bind("127.0.0.1", 0)
    second = bind("127.0.0.1", first.getsockname()[1])
    with first, second:
        first.listen()
        with pytest.raises(ConfigError, match="--port"):
            Server(app, second, 1.0, lambda: None).run_until_stopped()


def test_an_address_that_is_not_ours_is_an_error():
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1 port 8000.*--host"):
        bind("203.0.113.1", 8000)
