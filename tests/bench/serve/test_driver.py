import asyncio

import pytest

from perilune.bench.serve.driver import Driver
from perilune.bench.serve.transport import Increment, RequestFailure
from perilune.bench.serve.workload import Session, TokenSource, Turn, Workload, build_sessions

FIRST_S, NEXT_S = 2.0, 0.5


class Scripted:
    """Answers with the lengths of prompts so far, two seconds to the first token and half a second for each further."""

    def __init__(self, clock, failing=()):
        self.prompts = []
        self.sent_s = []
        self.num_open = self.max_open = 0
        self._clock = clock
        self._failing = failing

    async def complete(self, token_ids, max_tokens):
        self.prompts.append(tuple(token_ids))
        self.sent_s.append(self._clock.now_s() - 100.0)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            if len(self.prompts) - 1 in self._failing:
                raise RequestFailure("429 busy")
            for index in range(max_tokens):
                await self._clock.sleep(NEXT_S if index else FIRST_S)
                yield Increment((1000 + len(self.prompts),))
            yield Increment((), num_prompt_tokens=len(token_ids), num_cached_tokens=3)
        finally:
            self.num_open -= 1


def play(clock, sessions, *, concurrency=None, failing=()):
    async def main():
        transport = Scripted(clock, failing)
        return await clock.run(Driver(transport, concurrency=concurrency, clock=clock).play(sessions)), transport

    return asyncio.run(main())


def single(start_s=None, max_tokens=3):
    return Session(start_s, (Turn((1, 2), max_tokens, 0.0),))


def test_latencies_are_those_of_the_clock(clock):
    played, _ = play(clock, [single(max_tokens=4)])
    (record,) = played.records
    assert (record.ttft_s, record.e2el_s, record.itls_s) == (2.0, 3.5, [0.5] * 3)
    assert record.tpot_s == pytest.approx(0.5)
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (2, 3, 4)
    assert played.duration_s == pytest.approx(3.5)
    assert set(played.lags_s) == {0.0}


def test_closed_load_keeps_as_many_open_as_allowed_and_no_more(clock):
    played, transport = play(clock, [single() for _ in range(10)], concurrency=4)
    assert transport.max_open == played.max_concurrent == 4
    assert transport.sent_s == pytest.approx([0.0] * 4 + [3.0] * 4 + [6.0] * 2)
    assert played.duration_s == pytest.approx(9.0)


def test_open_load_sends_at_its_times_however_slow_the_answers(clock):
    sessions = build_sessions(Workload(num_prompts=30, request_rate=5.0, output_len=3), TokenSource())
    _, transport = play(clock, sessions)
    assert transport.sent_s == pytest.approx([session.start_s for session in sessions])
    assert transport.max_open > 4


def test_a_bound_delays_arrivals_that_find_no_room(clock):
    _, transport = play(clock, [single(0.0), single(1.0), single(10.0)], concurrency=1)
    assert transport.sent_s == pytest.approx([0.0, 3.0, 10.0])


def test_a_later_turn_goes_on_from_the_real_answer_after_its_pause(clock):
    session = Session(None, (Turn((1, 2), 2, 0.0), Turn((3,), 1, 4.0), Turn((4,), 1, 4.0)))
    played, transport = play(clock, [session])
    first = (1, 2, 1001, 1001, 3)
    assert transport.prompts == [(1, 2), first, (*first, 1002, 4)]
    assert transport.sent_s == pytest.approx([0.0, 6.5, 12.5])
    assert [record.turn for record in played.records] == [0, 1, 2]


def test_a_failure_ends_its_conversation_alone(clock):
    session = Session(None, (Turn((1,), 1, 0.0), Turn((2,), 1, 0.0), Turn((3,), 1, 0.0)))
    played, _ = play(clock, [session, single()], concurrency=1, failing=[1])
    assert [record.error for record in played.records] == [None, "429 busy", None]
    assert played.num_abandoned == 1


class Short:
    """Answers with one token, whatever was asked for, or with none."""

    def __init__(self, token_ids):
        self._token_ids = token_ids

    async def complete(self, token_ids, max_tokens):
        yield Increment(self._token_ids)


@pytest.mark.parametrize(("token_ids", "error"), [((), "no tokens"), ((7,), "fewer tokens than asked for")])
def test_an_answer_of_another_length_is_a_failure(clock, token_ids, error):
    async def main():
        return await clock.run(Driver(Short(token_ids), concurrency=None, clock=clock).play([single()]))

    assert asyncio.run(main()).records[0].error == error


def test_every_request_that_ended_is_told(clock):
    told = []

    async def main():
        driver = Driver(Scripted(clock, [0]), concurrency=1, clock=clock, on_request=lambda: told.append(clock.now_s()))
        await clock.run(driver.play([single(), single()]))

    asyncio.run(main())
    assert told == pytest.approx([100.0, 103.0])
