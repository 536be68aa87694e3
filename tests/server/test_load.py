"""The demo model behind the server, asked for more than it can do at once."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from perilune.config.engine import DEMO_CHECKPOINT, EngineConfig
from perilune.engine.build import build_engine
from perilune.engine.client import InProcessClient, ModelInfo
from perilune.server.app import create_app
from perilune.server.settings import ServerSettings
from tests.server.conftest import events, joined

LONG_TEXT = "The moon goes round the earth, and the earth goes round the sun. " * 12


class Load:
    """A server of its own with the demo model; `send` answers (path, body) side by side, in their order."""

    def __init__(self, **config):
        self.engine = build_engine(DEMO_CHECKPOINT, EngineConfig(**config))
        limits = self.engine.limits
        model = ModelInfo("demo", limits.max_model_len, limits.vocab_size, limits.eos_token_ids, 0)
        self._client = InProcessClient(self.engine, model)
        self._app = create_app(self._client, self.engine.tokenizer, ServerSettings())

    def send(self, *rounds):
        """Send each round of requests when the one before is answered; gives the answers of each, and the metrics."""

        async def run():
            transport = httpx.ASGITransport(self._app)
            async with (
                self._app.router.lifespan_context(self._app),
                httpx.AsyncClient(transport=transport, base_url="http://test", timeout=500) as http,
            ):
                answers = [
                    await asyncio.gather(*(http.post(path, json={"model": "demo", **body}) for path, body in requests))
                    for requests in rounds
                ]
                models = (await http.get("/v1/models")).json()
                metrics = (await http.get("/metrics")).text
                return answers, metrics, models

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, run()).result()


def chat(content, **fields):
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "reasoning_effort": "none", **fields}
    return "/v1/chat/completions", body


def complete(prompt, **fields):
    return "/v1/completions", {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}


def metric(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"perilune:{name}{{")]
    return float(line.rsplit(" ", 1)[1])


def test_streamed_json_of_short_and_long_inputs_at_once_ends_and_no_answer_is_one_character_over_and_over():
    load = Load(max_num_seqs=8, num_blocks=600, max_itl_ms=200)
    asked = {"stream": True, "response_format": {"type": "json_object"}, "max_tokens": 40}
    inputs = [text for index in range(16) for text in (f"{index}+4=?", f"{LONG_TEXT} What is round {index}?")]
    ((*answers,),), metrics, _ = load.send([chat(text, **asked) for text in inputs])
    assert len(answers) == 32
    for answer in answers:
        chunks = events(answer)
        content, reason = joined(chunks, "content"), chunks[-1]["choices"][0]["finish_reason"]
        assert content.startswith("{"), content
        assert len(set(content)) > 2, content
        if reason == "stop":
            assert isinstance(json.loads(content), dict)
        else:
            assert reason == "length", answer.text
    assert metric(metrics, "num_requests_running") == metric(metrics, "num_requests_waiting") == 0


def test_free_answers_to_short_inputs_are_right_while_long_ones_are_read_and_none_repeats_one_character():
    load = Load(max_num_seqs=8, num_blocks=600, max_itl_ms=200)
    sums = {f"{index}+4=": str(index + 4) for index in range(10, 26)}
    asked = {"stream": True, "max_tokens": 24}
    crowd = [chat(text, **asked) for short in sums for text in (short, f"{LONG_TEXT} What is {short}?")]
    ((*answers,),), _, _ = load.send(crowd)
    for text, answer in zip(sums, answers[::2], strict=True):
        chunks = events(answer)
        content = joined(chunks, "content")
        assert content.rstrip(".").endswith(sums[text]), (text, content)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    for answer in answers[1::2]:
        content = joined(events(answer), "content")
        assert len(set(content)) > 2, content


def test_the_context_that_is_told_is_one_that_can_be_served():
    load = Load(num_blocks=20, block_size=16, max_num_seqs=2)
    limit = load.engine.limits.max_model_len
    assert limit < 4096
    ((full,), (over,)), _, models = load.send(
        [complete([7] * (limit - 1), max_tokens=1)], [complete([7] * limit, max_tokens=1)]
    )
    assert models["data"][0]["max_model_len"] == limit
    assert (full.status_code, full.json()["usage"]["total_tokens"]) == (200, limit)
    assert (over.status_code, over.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("is_stream", [False, True])
def test_more_than_the_queue_takes_is_told_to_come_again_and_the_rest_is_answered(is_stream):
    load = Load(max_num_seqs=2, max_waiting=3, num_blocks=200)
    crowd = [complete([index, 9, 9], max_tokens=300, stream=is_stream) for index in range(20)]
    (answers, (later,)), metrics, _ = load.send(crowd, [complete([5], max_tokens=3)])
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(answers) - len(refused) >= 5
    assert refused
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all(answer.headers["content-type"] == "application/json" for answer in refused)
    assert later.status_code == 200
    assert metric(metrics, "num_requests_rejected_total") == len(refused)


def test_a_request_past_its_timeout_ends_whether_it_runs_or_waits_and_the_others_are_answered_in_full():
    load = Load(max_num_seqs=1, num_blocks=400)
    late = {"timeout": 0.05, "max_tokens": 4000}
    requests = [complete([1], **late), complete([2], **late), complete([3], max_tokens=30)]
    (answers, (alone,)), metrics, _ = load.send(requests, [complete([3], max_tokens=30)])
    assert [answer.status_code for answer in answers] == [408, 408, 200]
    assert answers[2].json()["choices"] == alone.json()["choices"]
    (timed_out,) = [line for line in metrics.splitlines() if 'success_total{finished_reason="timeout"' in line]
    assert timed_out.endswith(" 2.0")
    load.engine.check_integrity()


def test_priorities_are_refused_unless_the_server_was_started_with_them():
    urgent = complete([1], priority=-1, max_tokens=2)
    (((refused),),), *_ = Load(num_blocks=40).send([urgent])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    (((served),),), *_ = Load(num_blocks=40, scheduling_policy="priority").send([urgent])
    assert served.status_code == 200
