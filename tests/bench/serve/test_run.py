"""Loads against a real server on a loopback port whose engine answers by a script."""

import asyncio
import socket

import pytest

from perilune.bench.serve.run import Load, run_load
from perilune.bench.serve.workload import NUM_BYTE_IDS, Workload
from perilune.errors import CapacityError, ConfigError, RequestError
from perilune.server.settings import ServerSettings
from tests.server.conftest import MODEL_NAME


def run(server, *, concurrency=4, text_file=None, goals=None, model=None, api_key=None, **workload):
    load = Load(Workload(**workload), concurrency, text_file, NUM_BYTE_IDS, goals or {})
    return asyncio.run(run_load(server.url, load, model=model, api_key=api_key))


def answer(request):
    return [(len(request.prompt_token_ids) + index) % NUM_BYTE_IDS for index in range(request.params.max_tokens)]


def test_a_closed_load_is_answered_whole_and_adds_up(serve):
    server = serve(answer)
    found = run(server, num_prompts=12, input_len=20, output_len=5).as_json()
    assert (found["completed"], found["failed"], found["errors"]) == (12, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (240, 60)
    assert (found["model_id"], found["max_concurrency"], found["request_rate"]) == (MODEL_NAME, 4, "inf")
    assert found["mean_ttft_ms"] <= found["mean_e2el_ms"]
    assert len(server.engine.requests) == 13, "and one to warm up"
    assert all(request.params.ignore_eos and request.params.temperature == 0 for request in server.engine.requests)


def test_turns_continue_with_the_token_ids_that_were_answered(serve):
    server = serve(answer)
    run(server, num_prompts=1, turns=3, input_len=8, output_len=4, tool_len=2)
    _, first, second, third = (request.prompt_token_ids for request in server.engine.requests)
    assert second[:12] == (*first, *answer(server.engine.requests[1]))
    assert third[: len(second) + 4] == (*second, *answer(server.engine.requests[2]))
    assert len(third) == 8 + 4 + 2 + 4 + 2


def test_prompts_come_from_a_text(serve, tokenizer, tmp_path):
    path = tmp_path / "text"
    path.write_text("hello world " * 5)
    server = serve(answer)
    run(server, num_prompts=3, input_len=6, output_len=2, text_file=path)
    allowed = set(tokenizer.encode("hello world " * 5))
    assert all(set(request.prompt_token_ids) <= allowed for request in server.engine.requests[1:])


def test_refusals_are_counted_by_kind_and_the_run_goes_on(serve):
    def refuse(request):
        if len(server.engine.requests) > 4:
            raise RequestError("full", status=429, code="queue_full")
        if len(server.engine.requests) > 2:
            server.engine.requests.append(request)
            raise CapacityError("too large")
        return answer(request)

    server = serve(refuse)
    report = run(server, num_prompts=9, concurrency=1, input_len=4, output_len=2).report
    assert report.completed == 2
    assert report.errors == {"400 capacity_exceeded": 2, "429 queue_full": 5}


def test_a_server_that_stops_in_mid_answer_is_a_failure(serve):
    server = serve(answer, delay_s=0.01)
    server.script = lambda request: server.app.state.dispatcher.interrupt_all("bye") or answer(request)
    load = {"num_prompts": 1, "concurrency": 1, "input_len": 4, "output_len": 2}
    assert run(server, **load).report.completed == 1
    server.script = lambda request: answer(request)[: request.params.max_tokens - (len(request.prompt_token_ids) == 4)]
    assert run(server, **load).report.errors == {"fewer tokens than asked for": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "sun"}, "serves moon, not 'sun'"),
        ({"input_len": 600}, r"grows to 664 tokens; moon is served with 512.*--input-len"),
        ({"turns": 9, "tool_len": 100}, "grows to"),
    ],
)
def test_a_load_that_cannot_run_is_refused_before_it_begins(serve, changes, words):
    server = serve(answer)
    with pytest.raises(ConfigError, match=words):
        run(server, **changes)
    assert server.engine.requests == []


def test_a_key_is_sent_and_a_wrong_one_is_an_error(serve):
    server = serve(answer, settings=ServerSettings(api_key="k"))
    assert run(server, num_prompts=1, output_len=1, api_key="k").report.completed == 1
    with pytest.raises(ConfigError, match="answers 401"):
        run(server, num_prompts=1, api_key="wrong")


def test_nobody_there_is_an_error_that_asks_for_the_server(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    load = Load(Workload(), 1, None, NUM_BYTE_IDS, {})
    with pytest.raises(ConfigError, match="is the server running"):
        asyncio.run(run_load(url, load, model=None, api_key=None))


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[", "http://a:b"])
def test_an_address_that_is_none_is_an_error(url):
    load = Load(Workload(), 1, None, NUM_BYTE_IDS, {})
    with pytest.raises(ConfigError, match=r"does not answer|give one such as"):
        asyncio.run(run_load(url, load, model=None, api_key=None))


def test_a_server_without_token_ids_in_its_answers_is_refused(serve):
    server = serve(lambda request: [])
    with pytest.raises(ConfigError, match="return_token_ids"):
        run(server, num_prompts=1)
