import asyncio
import threading
import time

import pytest

from perilune.cache.chain import PrefixChain
from perilune.engine.client import InProcessClient, ModelInfo
from perilune.engine.request import FinishReason, GenerateRequest
from perilune.errors import CapacityError, RequestError
from perilune.sampling.params import SamplingParams
from tests.engine.counting_model import EOS, NAN_TOKEN, VOCAB, expected_tokens, make_core, tokens_of

MODEL = ModelInfo("counting", max_model_len=200, vocab_size=VOCAB, eos_token_ids=(EOS,), created=0)
SOON_S = 30.0


class Gate:
    """Lets the engine run step by step: each step waits for a permit once `close` was called."""

    def __init__(self, core):
        self._open = threading.Event()
        self._permits = threading.Semaphore(0)
        self._open.set()
        self._step = core.step
        self.num_steps = 0
        core.step = self.step

    def step(self):
        while not self._open.is_set() and not self._permits.acquire(timeout=0.01):
            pass
        self.num_steps += 1
        return self._step()

    def close(self):
        self._open.clear()

    def open(self):
        self._open.set()


@pytest.fixture
def engine():
    """A started client with its core; stopped at the end."""
    core, _ = make_core(max_num_seqs=16, num_blocks=200)
    client = InProcessClient(core, MODEL)
    client.start()
    yield client, core
    client.stop(0)


def message(request_id, prompt, **params):
    return GenerateRequest(request_id, tuple(prompt), SamplingParams(**{"temperature": 0.0, **params}))


async def collect(client, request):
    return [output async for output in client.generate(request)]


async def until(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.002)


def is_idle(client):
    stats = client.stats()
    return (stats.num_running, stats.num_waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)


def test_sixteen_concurrent_streams_get_their_own_tokens(engine):
    client, _ = engine

    async def main():
        requests = [message(f"r{index}", [index, 7], max_tokens=10 + index) for index in range(16)]
        return await asyncio.gather(*(collect(client, request) for request in requests))

    for index, outputs in enumerate(asyncio.run(main())):
        assert tokens_of(outputs) == expected_tokens([index, 7], 10 + index)
        assert [output.is_finished for output in outputs] == [*[False] * (len(outputs) - 1), True]
    assert is_idle(client)


def test_what_can_never_be_served_raises_from_the_call_itself(engine):
    client, core = engine
    with pytest.raises(RequestError) as caught:
        client.generate(message("r", [1] * 200))
    assert caught.value.code == "context_length_exceeded"
    small = InProcessClient(make_core(num_blocks=2)[0], MODEL)
    small.start()
    with pytest.raises(CapacityError):
        small.generate(message("r", [1] * 20))
    small.stop(0)
    assert not core.has_work


def test_a_generator_that_is_never_awaited_submits_nothing(engine):
    client, core = engine

    async def main():
        await client.generate(message("r", [1])).aclose()

    asyncio.run(main())
    assert not core.has_work


def test_closing_a_stream_frees_its_request_within_one_step_and_spares_the_others(engine):
    client, core = engine
    gate = Gate(core)

    async def main():
        stream = client.generate(message("leaving", [1], max_tokens=150))
        staying = asyncio.create_task(collect(client, message("staying", [2], max_tokens=40)))
        await anext(stream)
        gate.close()
        await stream.aclose()
        steps_before = gate.num_steps
        gate.open()
        await until(lambda: "leaving" not in core.live_request_ids)
        return await staying, steps_before

    outputs, steps_before = asyncio.run(main())
    assert gate.num_steps > steps_before
    assert tokens_of(outputs) == expected_tokens([2], 40)
    assert client.stats().finished_total[FinishReason.ABORT] == 1
    assert is_idle(client)


def test_a_cancelled_reader_frees_its_request_before_its_first_output(engine):
    client, core = engine
    gate = Gate(core)
    gate.close()

    async def main():
        reading = asyncio.create_task(collect(client, message("r", [1], max_tokens=150)))
        await until(lambda: core.live_request_ids)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        gate.open()
        await until(lambda: is_idle(client) and not core.live_request_ids)

    asyncio.run(main())
    assert client.stats().generation_tokens_total <= 1


def test_a_stream_left_by_break_is_aborted(engine):
    client, core = engine

    async def main():
        async for _ in client.generate(message("r", [1], max_tokens=150)):
            break
        await until(lambda: not core.live_request_ids)

    asyncio.run(main())


def test_an_abort_ends_the_stream_with_reason_abort(engine):
    client, _ = engine

    async def main():
        stream = client.generate(message("r", [1], max_tokens=150))
        await anext(stream)
        client.abort("r")
        client.abort("unknown")
        return [output async for output in stream]

    assert asyncio.run(main())[-1].finish_reason is FinishReason.ABORT
    assert is_idle(client)


def test_an_id_is_refused_until_the_engine_has_ended_the_request_that_has_it(engine):
    client, core = engine
    gate = Gate(core)

    async def main():
        first = client.generate(message("r", [1], max_tokens=150))
        await anext(first)
        with pytest.raises(RequestError, match="'r' is running"):
            await anext(client.generate(message("r", [2])))
        gate.close()
        await first.aclose()
        with pytest.raises(RequestError, match="'r' is running"):
            await anext(client.generate(message("r", [2])))
        gate.open()
        await until(lambda: not client._streams)
        return await collect(client, message("r", [2], max_tokens=3))

    assert tokens_of(asyncio.run(main())) == expected_tokens([2], 3)


def test_a_failed_request_leaves_the_others_and_the_engine_well(engine):
    client, _ = engine

    async def main():
        return await asyncio.gather(
            collect(client, message("bad", [NAN_TOKEN])), collect(client, message("good", [3], max_tokens=9))
        )

    bad, good = asyncio.run(main())
    assert bad[-1].finish_reason is FinishReason.ERROR
    assert tokens_of(good) == expected_tokens([3], 9)
    assert client.check_health() is None


def test_streams_of_several_event_loops_are_served(engine):
    client, _ = engine
    found = {}

    def serve(index):
        found[index] = tokens_of(asyncio.run(collect(client, message(f"r{index}", [index], max_tokens=20))))

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert found == {index: expected_tokens([index], 20) for index in range(4)}


def test_the_outputs_of_one_step_reach_a_loop_in_one_wake_up(engine):
    client, core = engine
    gate = Gate(core)
    gate.close()

    async def main():
        loop = asyncio.get_running_loop()
        wake_ups = []
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args, **kwargs: wake_ups.append(args) or original(*args, **kwargs)
        reading = [asyncio.create_task(collect(client, message(f"r{index}", [1], max_tokens=5))) for index in range(6)]
        await until(lambda: len(client._streams) == 6)
        gate.open()
        await asyncio.gather(*reading)
        return len(wake_ups)

    assert asyncio.run(main()) <= gate.num_steps < 30


def test_an_idle_engine_takes_no_steps(engine):
    client, core = engine
    gate = Gate(core)
    asyncio.run(collect(client, message("r", [1], max_tokens=3)))
    steps = gate.num_steps
    time.sleep(0.05)
    assert gate.num_steps == steps


def test_the_death_of_the_engine_reaches_every_stream_and_the_health(engine):
    client, core = engine

    async def main():
        streams = [client.generate(message(f"r{index}", [1], max_tokens=150)) for index in range(3)]
        for stream in streams:
            await anext(stream)

        def broken():
            raise AssertionError("accounts do not add up")

        core.step = broken
        return [[output async for output in stream][-1] for stream in streams]

    for output in asyncio.run(main()):
        assert output.finish_reason is FinishReason.ERROR
        assert "accounts do not add up" in output.error
    assert "accounts do not add up" in client.check_health()
    with pytest.raises(RequestError, match="the engine died") as caught:
        client.generate(message("late", [1]))
    assert caught.value.status == 503


def test_a_leak_is_noticed_when_the_engine_goes_idle(engine):
    client, core = engine
    core._cache.admit("nobody", PrefixChain([1], core._cache.block_size))
    asyncio.run(collect(client, message("r", [1], max_tokens=2)))
    client._engine._thread.join(SOON_S)
    assert "held by no request" in client.check_health()


def test_stopping_lets_running_requests_finish_and_refuses_new_ones(engine):
    client, core = engine
    gate = Gate(core)

    async def main():
        stream = client.generate(message("r", [1], max_tokens=40))
        first = await anext(stream)
        gate.close()
        stopping = asyncio.create_task(asyncio.to_thread(client.stop, SOON_S))
        await until(lambda: client.check_health() is not None)
        with pytest.raises(RequestError, match="shutting down") as caught:
            client.generate(message("late", [1]))
        assert caught.value.status == 503
        gate.open()
        outputs = [first] + [output async for output in stream]
        await stopping
        return outputs

    assert tokens_of(asyncio.run(main())) == expected_tokens([1], 40)
    assert client.check_health() == "the engine is stopped"


def test_stopping_without_patience_aborts_what_runs(engine):
    client, core = engine

    async def main():
        stream = client.generate(message("r", [1], max_tokens=190))
        await anext(stream)
        await asyncio.to_thread(client.stop, 0)
        return [output async for output in stream]

    assert asyncio.run(main())[-1].finish_reason is FinishReason.ABORT
    assert not core.has_work
    assert is_idle(client)


def test_a_closed_event_loop_does_not_hold_its_requests(engine):
    client, core = engine

    async def main():
        stream = client.generate(message("r", [1], max_tokens=190))
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(main())
    loop.close()
    asyncio.run(until(lambda: not core.live_request_ids))
    assert client.check_health() is None
    del stream


def test_a_full_queue_refuses_at_once_and_takes_more_when_it_has_room():
    core, _ = make_core(max_num_seqs=2, max_waiting=3)
    client = InProcessClient(core, MODEL)
    gate = Gate(core)
    gate.close()
    client.start()

    async def main():
        taken = [
            asyncio.create_task(collect(client, message(f"r{index}", [index], max_tokens=5))) for index in range(5)
        ]
        await until(lambda: len(client._streams) == 5)
        with pytest.raises(RequestError) as caught:
            client.generate(message("early", [9]))
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        assert client.stats().num_rejected_total == 1
        gate.open()
        await asyncio.gather(*taken)
        return await collect(client, message("later", [9], max_tokens=4))

    assert tokens_of(asyncio.run(main())) == expected_tokens([9], 4)
    client.stop(0)


def test_a_queue_that_filled_between_the_call_and_the_first_output_refuses_then():
    core, _ = make_core(max_num_seqs=1, max_waiting=0)
    client = InProcessClient(core, MODEL)
    gate = Gate(core)
    gate.close()
    client.start()

    async def main():
        both = [client.generate(message(name, [1], max_tokens=3)) for name in "ab"]
        first = asyncio.create_task(anext(both[0]))
        await until(lambda: client._streams)
        with pytest.raises(RequestError) as caught:
            await anext(both[1])
        gate.open()
        await first
        await both[0].aclose()
        return caught.value

    assert asyncio.run(main()).status == 429
    assert client.stats().num_rejected_total == 1
    client.stop(0)


def test_a_client_that_leaves_the_queue_makes_room_for_another():
    core, _ = make_core(max_num_seqs=1, max_waiting=1, num_blocks=2000, max_model_len=6000)
    client = InProcessClient(core, MODEL)
    client.start()

    async def main():
        running = client.generate(message("running", [1], max_tokens=5000))
        await anext(running)
        leaving = asyncio.create_task(collect(client, message("leaving", [2])))
        await until(lambda: client.stats().num_waiting == 1)
        with pytest.raises(RequestError, match="the queue is full"):
            client.generate(message("refused", [3]))
        leaving.cancel()
        await until(lambda: client.stats().num_waiting == 0)
        outputs = asyncio.create_task(collect(client, message("next", [4], max_tokens=2)))
        await until(lambda: client.stats().num_waiting == 1 or outputs.done())
        await running.aclose()
        return await outputs

    assert tokens_of(asyncio.run(main())) == expected_tokens([4], 2)
    client.stop(0)
