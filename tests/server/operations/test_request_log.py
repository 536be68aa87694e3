import logging

import pytest

from perilune.server.operations.log_format import CURRENT_REQUEST_ID
from tests.server.conftest import END, events


@pytest.fixture
def records(caplog):
    """What was logged, each record with the id that a handler of the server would give it."""
    found = []

    class Keeper(logging.Handler):
        def emit(self, record):
            found.append((getattr(record, "request_id", CURRENT_REQUEST_ID.get()), record))

    keeper = Keeper()
    logging.getLogger("perilune").addHandler(keeper)
    caplog.set_level(logging.DEBUG, "perilune")
    yield found
    logging.getLogger("perilune").removeHandler(keeper)


def test_an_id_is_taken_over_and_echoed_whatever_the_answer(server):
    asked = [("GET", "/health"), ("GET", "/v1/nothing"), ("POST", "/v1/chat/completions"), ("GET", "/metrics")]
    for method, path in asked:
        response = server.http.request(method, path, headers={"X-Request-Id": "trace-1:a/b"})
        assert response.headers["x-request-id"] == "trace-1:a/b", path
    body = {"model": "moon", "prompt": "x", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "s"}) as response:
        assert response.headers["x-request-id"] == "s"


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "a\tb"])
def test_without_a_usable_id_a_new_one_is_given(server, given):
    headers = {} if given is None else {"X-Request-Id": given}
    first, second = (server.http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2))
    assert first.startswith("req-")
    assert first != second


def test_every_line_of_a_request_carries_its_id(serve, records):
    server = serve("hello" + END)
    events(server.http.post("/v1/chat/completions", json=chat(stream=True), headers={"X-Request-Id": "mine"}))
    server.wait_until(lambda: len(records) >= 2)
    assert {request_id for request_id, _ in records} == {"mine"}
    generated, ended = (record for _, record in records)
    assert (generated.getMessage(), generated.finished) == ("generated", "stop")
    assert generated.prompt_tokens == len(server.engine.requests[0].prompt_token_ids)
    assert generated.output_tokens > 0
    assert (ended.getMessage(), ended.status, ended.complete) == ("POST /v1/chat/completions", 200, True)
    assert server.engine.requests[0].log_id == "mine"


def test_a_fault_is_logged_under_its_request(serve, records):
    def fail(request):
        raise KeyError("x")

    server = serve(fail)
    response = server.http.post("/v1/chat/completions", json=chat(), headers={"X-Request-Id": "bad"})
    assert response.status_code == 500
    assert [request_id for request_id, record in records if record.exc_info] == ["bad"]


def test_an_answer_that_nobody_waits_for_is_logged_as_such(serve, records):
    server = serve(lambda request: [65] * 100, delay_s=0.02)
    with server.http.stream("POST", "/v1/completions", json={"model": "moon", "prompt": "x", "stream": True}) as answer:
        next(answer.iter_lines())
    server.wait_until(lambda: len(records) >= 2)
    generated, ended = (record for _, record in records)
    assert generated.finished == "left"
    assert (ended.status, ended.complete) == (200, False)


def test_what_supervisors_ask_is_logged_for_debugging_only(server, records):
    server.http.get("/health")
    server.http.get("/metrics")
    server.http.get("/v1/models")
    server.wait_until(lambda: len(records) >= 3)
    assert [record.levelname for _, record in records] == ["DEBUG", "DEBUG", "INFO"]


def chat(**fields):
    return {"model": "moon", "messages": [{"role": "user", "content": "hello"}], **fields}
