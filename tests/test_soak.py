"""The soak of `benchmarks`, for seconds instead of minutes, and that it sees what is wrong."""

import asyncio
import itertools
import json

import httpx
import pytest

from benchmarks.soak.__main__ import main
from benchmarks.soak.clients import Tally, ask, run_alone, run_clients
from benchmarks.soak.jobs import KINDS, Job, make_jobs
from tests.server.conftest import MODEL_NAME, serve, tokenizer  # noqa: F401 - fixtures

PROMPT = Job("p", "ids", "/v1/completions", {"model": MODEL_NAME, "prompt": [1, 2], "max_tokens": 4})


def test_a_server_survives_clients_that_leave_and_every_answer_is_the_one_it_gives_alone(capsys):
    code = main(["--minutes", "0.35", "--jobs", "2", "--json"])
    outcome = json.loads(capsys.readouterr().out)
    assert (code, outcome["failures"]) == (0, [])
    assert (outcome["num_wrong"], outcome["num_errors"]) == (0, 0)
    assert set(outcome["finished"]) == set(KINDS)
    assert outcome["preemptions"] > 0
    assert outcome["rss_start_mib"] > 10


def with_client(server, use):
    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
            return await use(http)

    return asyncio.run(run())


def test_an_answer_that_changes_is_seen_alone_and_under_load(serve):  # noqa: F811
    numbers = itertools.count(65)
    server = serve(lambda request: [next(numbers)] * 4)

    async def use(http):
        alone, tally = Tally(), Tally()
        expected = await run_alone(http, [PROMPT], alone)
        await run_clients(http, [PROMPT], expected, tally, num_clients=4, seconds=0.5, seed=0)
        return alone, tally

    alone, tally = with_client(server, use)
    assert alone.num_wrong == 1
    assert tally.num_wrong > 0
    assert tally.finished.total() == 0
    assert "is not" in tally.wrong[0]


def test_an_error_that_was_not_meant_is_seen(serve):  # noqa: F811
    server = serve(lambda request: [65] * 4)

    async def use(http):
        tally = Tally()
        expected = await run_alone(http, [PROMPT], tally)
        server.engine.failure = "the engine died"
        await run_clients(http, [PROMPT], expected, tally, num_clients=2, seconds=0.2, seed=0)
        return tally

    tally = with_client(server, use)
    assert tally.num_errors > 0
    assert "status 503" in tally.errors[0]


@pytest.mark.parametrize("num_events", [0, 2])
def test_leaving_ends_the_request(serve, num_events):  # noqa: F811
    server = serve(lambda request: [65] * 20, delay_s=0.05)
    job = Job("p", "ids", "/v1/completions", {**PROMPT.body, "max_tokens": 20})
    assert with_client(server, lambda http: ask(http, job, is_stream=True, num_events=num_events)) is None
    server.wait_until_idle()
    assert server.engine.num_aborts == 1


def test_jobs_are_of_every_kind_and_the_same_for_a_seed():
    jobs = make_jobs("m", 2, 0)
    assert [job.kind for job in jobs] == [kind for kind in KINDS for _ in range(2)]
    assert jobs == make_jobs("m", 2, 0)
    assert jobs != make_jobs("m", 2, 1)
