"""What clients of each API see of a full queue, of a request that took too long, and of priorities."""

import json

import anthropic
import httpx2
import openai
import pytest

from perilune.engine.request import FinishReason, RequestOutput
from perilune.errors import RequestError
from perilune.server.settings import ServerSettings
from tests.server.conftest import DEADLINE_S, MODEL_NAME

TURNS = [{"role": "user", "content": "hello"}]
CHAT = ("/v1/chat/completions", {"messages": TURNS})
COMPLETION = ("/v1/completions", {"prompt": "hello"})
RESPONSE = ("/v1/responses", {"input": "hello"})
MESSAGES = ("/v1/messages", {"messages": TURNS, "max_tokens": 9})
OPENAI = [CHAT, COMPLETION, RESPONSE]
LATE = "the request took longer than its timeout of 2 s; it had 1 tokens of its answer"


def post(server, route, **fields):
    return server.http.post(route[0], json={"model": MODEL_NAME, **route[1], **fields})


def full(request):
    raise RequestError(
        "the queue is full: 3 requests wait and --max-waiting is 3; try again in 7 s",
        status=429,
        code="rate_limit_exceeded",
        retry_after_s=7,
    )


def late(num_tokens):
    """A script of so many tokens, after which the time is over."""

    def outputs(request):
        ids = [(104,)] * num_tokens
        news = [RequestOutput(request.request_id, x, None, None, None, None, None, 5, 0, 1) for x in ids]
        end = RequestOutput(request.request_id, (), None, None, FinishReason.TIMEOUT, None, LATE, 5, 0, num_tokens)
        return [*news, end]

    return outputs


@pytest.mark.parametrize("route", OPENAI, ids=lambda route: route[0])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_full_queue_is_status_429_in_the_shape_of_openai_before_anything_is_streamed(serve, route, is_stream):
    answer = post(serve(full), route, stream=is_stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    error = answer.json()["error"]
    assert error["message"].endswith("try again in 7 s")
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_full_queue_is_status_429_in_the_shape_of_anthropic(serve, is_stream):
    answer = post(serve(full), MESSAGES, stream=is_stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_the_official_clients_know_a_full_queue(serve):
    url = serve(full).url
    with pytest.raises(openai.RateLimitError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0).responses.create(model=MODEL_NAME, input="x")
    client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0, timeout=httpx2.Timeout(DEADLINE_S))
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(model=MODEL_NAME, messages=TURNS, max_tokens=9)


@pytest.mark.parametrize("route", OPENAI, ids=lambda route: route[0])
@pytest.mark.parametrize(("is_stream", "num_tokens"), [(False, 0), (False, 3), (True, 0)])
def test_a_request_that_took_too_long_is_status_408_in_the_shape_of_openai(serve, route, is_stream, num_tokens):
    answer = post(serve(late(num_tokens)), route, stream=is_stream)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
    error = answer.json()["error"]
    assert (error["message"], error["type"], error["code"]) == (LATE, "timeout_error", "timeout")


def test_a_message_that_took_too_long_is_status_504_in_the_shape_of_anthropic(serve):
    answer = post(serve(late(3)), MESSAGES)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    assert answer.json() == {
        "type": "error",
        "error": {"type": "timeout_error", "message": LATE, "details": {"error_code": "timeout"}},
    }


def test_the_official_clients_do_not_ask_again_when_the_time_is_over(serve):
    server = serve(late(0))
    with pytest.raises(openai.APIStatusError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k").responses.create(model=MODEL_NAME, input="x")
    client = anthropic.Anthropic(base_url=server.url, api_key="k", timeout=httpx2.Timeout(DEADLINE_S))
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(model=MODEL_NAME, messages=TURNS, max_tokens=9)
    assert len(server.engine.requests) == 2


def test_a_stream_whose_time_is_over_ends_with_an_error_event_after_what_was_sent(serve):
    server = serve(late(3))
    for route in (CHAT, COMPLETION):
        frames = post(server, route, stream=True).text.strip().split("\n\n")
        assert len(frames) > 1
        assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    last = post(server, RESPONSE, stream=True).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    assert json.loads(last.split("data: ")[1])["code"] == "timeout"
    last = post(server, MESSAGES, stream=True).text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("event: error\ndata: "))["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("route", [*OPENAI, MESSAGES], ids=lambda route: route[0])
def test_priority_timeout_and_salt_reach_the_engine_from_every_api(serve, route):
    server = serve(settings=ServerSettings(request_timeout_s=60.0))
    assert post(server, route, priority=-3, timeout=2, cache_salt="mine").status_code == 200
    assert post(server, route).status_code == 200
    found = [(x.priority, x.timeout_s, x.cache_salt) for x in server.engine.requests]
    assert found == [(-3, 2.0, "mine"), (0, 60.0, None)]


@pytest.mark.parametrize("route", [*OPENAI, MESSAGES], ids=lambda route: route[0])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"timeout": 0}, "timeout is 0; it must be a number of seconds above 0"),
        ({"timeout": -1.5}, "timeout is -1.5; it must be a number of seconds above 0"),
        ({"timeout": 61}, "timeout is 61; this server allows at most 60 seconds"),
        ({"timeout": "5"}, "timeout: expected number or null, got string"),
        ({"priority": 1.5}, "priority: expected integer or null, got number"),
        ({"priority": True}, "priority: expected integer or null, got boolean"),
    ],
)
def test_a_wrong_priority_or_timeout_is_refused_and_named(serve, route, fields, message):
    server = serve(settings=ServerSettings(request_timeout_s=60.0))
    answer = post(server, route, **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert server.engine.requests == []


def test_without_a_limit_any_timeout_is_allowed(serve):
    server = serve()
    assert post(server, CHAT, timeout=1e9).status_code == 200
    assert server.engine.requests[0].timeout_s == 1e9
