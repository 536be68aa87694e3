"""A client that leaves frees what it asked for, at every moment; failures reach the client that caused them."""

import json
import socket
import threading

import httpx
import pytest

from perilune.engine.request import FinishReason, RequestOutput
from perilune.server.settings import ServerSettings
from tests.server.conftest import END, MODEL_NAME, events

SLOW_S = 3600.0


def raw_request(server, path="/v1/chat/completions", **fields) -> socket.socket:
    """Send a request and return its open connection, nothing of the answer read."""
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hello"}]}
    body = json.dumps({"model": MODEL_NAME, **prompt, **fields}).encode()
    address = server.http.base_url
    connection = socket.create_connection((address.host, address.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def output(request, *, error=None, reason=None, token_ids=()):
    return RequestOutput(request.request_id, token_ids, None, None, reason, None, error, 5, 0, len(token_ids))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_leaving_before_the_first_byte_frees_the_requests(serve, path, fields):
    server = serve(delay_s=SLOW_S)
    connection = raw_request(server, path, **fields)
    num_requests = fields.get("n", 1)
    server.wait_until(lambda: server.engine.stats().num_running == num_requests)
    connection.close()
    server.wait_until_idle()
    assert server.engine.num_aborts == num_requests


@pytest.mark.parametrize("fields", [{}, {"n": 3}])
def test_leaving_in_mid_stream_frees_the_requests(serve, tokenizer, fields):
    endless = tokenizer.encode("hello" * 40)
    server = serve(lambda request: endless, delay_s=0.05)
    with server.http.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}], "stream": True, **fields},
    ) as response:
        next(response.iter_bytes())
    server.wait_until_idle()
    assert server.engine.num_aborts == fields.get("n", 1)


def test_a_client_that_reads_nothing_and_leaves_frees_its_request(serve, tokenizer):
    endless = tokenizer.encode("hello" * 40)
    server = serve(lambda request: endless, delay_s=0.01)
    connection = raw_request(server, stream=True)
    server.wait_until(lambda: server.engine.stats().num_running == 1)
    connection.close()
    server.wait_until_idle()


def test_leaving_while_the_body_is_sent_starts_nothing(server):
    address = server.http.base_url
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.chat().status_code == 200
    assert len(server.engine.requests) == 1


def test_one_answer_does_not_wait_for_another(serve, tokenizer):
    hello = tokenizer.encode_markup("hello" + END)
    server = serve(lambda request: hello, delay_s=0.0)
    slow = raw_request(serve(delay_s=SLOW_S), stream=True)
    assert server.chat().status_code == 200
    slow.close()


def test_an_error_before_the_first_token_is_an_ordinary_error(serve):
    server = serve(lambda request: [output(request, error="logits are not finite", reason=FinishReason.ERROR)])
    for fields in ({}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
        response = server.chat(**fields)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "logits are not finite"
        server.wait_until_idle()


def test_an_error_in_mid_stream_is_the_last_event(serve, tokenizer):
    token_ids = tuple(tokenizer.encode("hello"))
    server = serve(
        lambda request: [
            output(request, token_ids=token_ids),
            output(request, error="logits are not finite", reason=FinishReason.ERROR),
        ]
    )
    response = server.chat(stream=True)
    *_, last, end = response.content.split(b"\n\n")
    assert end == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "logits are not finite"
    assert b"[DONE]" not in response.content


@pytest.mark.parametrize("profile", ["kimi", "kvv"])
@pytest.mark.parametrize(
    ("cut", "finish_reason"),
    [
        ({"error": "logits are not finite", "reason": FinishReason.ERROR}, "unexpected_state"),
        ({"error": "too slow", "reason": FinishReason.TIMEOUT}, "server_interrupted"),
        ({"reason": FinishReason.ABORT}, "server_interrupted"),
        ({"token_ids": ("no number",)}, "unknown"),
    ],
)
def test_a_stream_of_moonshots_profiles_that_is_cut_ends_abnormally_and_without_an_error(
    serve, tokenizer, profile, cut, finish_reason
):
    token_ids = tuple(tokenizer.encode("hello"))
    server = serve(
        lambda request: [output(request, token_ids=token_ids), output(request, **cut)],
        settings=ServerSettings(profile=profile),
    )
    response = server.chat(stream=True, stream_options={"include_usage": True})
    assert response.content.endswith(b"data: [DONE]\n\n")
    *_, end, summary = events(response)
    assert end["choices"][0]["finish_reason"] == finish_reason
    assert end["choices"][0]["delta"] == {}
    assert end["choices"][0]["usage"]["completion_tokens"] == len(token_ids)
    assert summary["choices"] == []
    assert summary["usage"] == end["choices"][0]["usage"]
    assert all("error" not in event for event in events(response))
    server.wait_until_idle()


def test_an_error_before_the_first_token_is_an_ordinary_error_under_every_profile(serve):
    script = [{"error": "logits are not finite", "reason": FinishReason.ERROR}]
    for profile in ("open", "kimi", "kvv"):
        server = serve(
            lambda request: [output(request, **cut) for cut in script], settings=ServerSettings(profile=profile)
        )
        assert server.chat(stream=True).status_code == 500


def test_a_fault_in_mid_stream_is_an_event_that_tells_only_the_log(serve, caplog):
    def unreadable(request):
        return [output(request, token_ids=(65,)), output(request, token_ids=("no number",))]

    server = serve(unreadable)
    response = server.chat(stream=True)
    *_, last, end = response.content.split(b"\n\n")
    assert end == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert "TypeError" not in response.text
    server.wait_until(lambda: "TypeError" in caplog.text)


def test_one_failed_choice_ends_the_others(serve):
    def script(request):
        if request.request_id.endswith("-1"):
            return [output(request, error="bad", reason=FinishReason.ERROR)]
        return [output(request, token_ids=(65,)) for _ in range(1000)]

    server = serve(script, delay_s=0.01)
    assert server.chat(n=3).status_code == 500
    server.wait_until_idle()
    assert server.engine.num_aborts == 2


def test_interrupted_answers_end_with_an_error_that_says_why(serve, tokenizer):
    endless = tokenizer.encode("hello" * 40)
    server = serve(lambda request: endless, delay_s=0.2)
    bodies: dict[str, httpx.Response] = {}
    whole = threading.Thread(target=lambda: bodies.update(whole=server.chat()))
    streamed = threading.Thread(target=lambda: bodies.update(streamed=server.chat(stream=True)))
    for thread in (whole, streamed):
        thread.start()
    server.wait_until(lambda: server.engine.stats().num_running == 2)
    server.call_in_loop(server.app.state.dispatcher.interrupt_all, "going home")
    for thread in (whole, streamed):
        thread.join()
    assert bodies["whole"].status_code == 503
    for response in bodies.values():
        assert "going home" in response.text
        assert "server_interrupted" in response.text
    server.wait_until_idle()


def test_streams_of_many_clients_do_not_mix(serve, tokenizer):
    def echo(request):
        spoken = tokenizer.decode(request.prompt_token_ids).rpartition("WORD")[2][:3]
        return tokenizer.encode_markup(spoken * 10 + END)

    server = serve(echo, delay_s=0.001)
    results: dict[int, str] = {}

    def ask(number: int) -> None:
        chunks = events(server.chat(f"WORD{number:03d}", stream=True, reasoning_effort="none"))
        results[number] = "".join(choice["delta"].get("content", "") for c in chunks for choice in c["choices"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number:03d}" * 10 for number in range(16)}
    server.wait_until_idle()
