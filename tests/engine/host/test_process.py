"""An engine in a process of its own: the same answers, and what happens when one of the two processes dies."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from perilune.config.engine import EngineConfig
from perilune.engine.build import build_engine
from perilune.engine.client import InProcessClient, ModelInfo
from perilune.engine.host.child import describe_exit
from perilune.engine.host.process import ProcessClient
from perilune.engine.host.wire import EngineSpec
from perilune.engine.request import FinishReason, GenerateRequest
from perilune.errors import CapacityError, ConfigError, EngineError, RequestError
from perilune.grammar.answer import lark_body, text_grammar
from perilune.sampling.params import SamplingParams
from tests.engine.host import faults

SOON_S = 60.0
CONFIG = EngineConfig(max_num_seqs=4, num_blocks=32, max_model_len=256, dtype="float32")


def spec_of(checkpoint, prepare=faults.nothing, step_timeout_s=300.0):
    return EngineSpec(checkpoint, CONFIG, 1, step_timeout_s, prepare)


@pytest.fixture
def launch(random_checkpoint):
    """Make and start clients; whatever is left of them ends with the test."""
    clients = []

    def make(prepare=faults.nothing, **options):
        client = ProcessClient(spec_of(random_checkpoint, prepare), "random", **options)
        clients.append(client)
        client.start()
        return client

    yield make
    for client in clients:
        client.stop(0)
        assert not is_there(client.pid), "a process is left"


def is_there(pid):
    """Whether a process exists, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def wait_until(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def message(name="r", prompt=(1, 2, 3), **params):
    return GenerateRequest(name, tuple(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}))


async def collect(client, request):
    return [output async for output in client.generate(request)]


def answer(client, request):
    return asyncio.run(collect(client, request))


REQUESTS = [
    message("greedy"),
    message("seeded", [5], temperature=1.0, seed=3, max_tokens=30),
    message("scored", [7, 8], logprobs=2, prompt_logprobs=1),
    message("stopped", [9] * 40, stop=("a",), max_tokens=60),
]

BAD_GRAMMAR = GenerateRequest(
    "g",
    (1,),
    SamplingParams(),
    grammar=text_grammar(lark_body("start: nowhere", "structured_outputs.grammar")),
)


def test_answers_are_those_of_an_engine_in_a_thread(launch, random_checkpoint):
    core = build_engine(random_checkpoint, CONFIG)
    model = ModelInfo("random", core.limits.max_model_len, core.limits.vocab_size, core.limits.eos_token_ids, 0)
    thread, process = InProcessClient(core, model), launch()
    thread.start()

    async def all_of(client):
        return await asyncio.gather(*(collect(client, request) for request in REQUESTS))

    assert asyncio.run(all_of(process)) == asyncio.run(all_of(thread))
    assert (process.model.max_model_len, process.model.vocab_size) == (model.max_model_len, model.vocab_size)
    wait_until(lambda: process.stats().finished_total == thread.stats().finished_total)
    assert process.stats().generation_tokens_total == thread.stats().generation_tokens_total
    thread.stop(0)


def test_refusals_are_those_of_an_engine_in_a_thread(launch):
    client = launch()
    with pytest.raises(RequestError) as caught:
        client.generate(message(prompt=[1] * 256))
    assert caught.value.code == "context_length_exceeded"
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            answer(client, BAD_GRAMMAR)
        assert (caught.value.param, caught.value.status) == ("structured_outputs.grammar", 400)
    assert len(client._streams) == 0

    async def twice():
        stream = client.generate(message("same", max_tokens=200))
        await anext(stream)
        with pytest.raises(RequestError, match="is running"):
            await anext(client.generate(message("same")))
        await stream.aclose()

    asyncio.run(twice())


def test_leaving_frees_the_request_and_what_is_held_can_be_seen(launch):
    client = launch()

    async def main():
        stream = client.generate(message("leaving", ignore_eos=True, max_tokens=200))
        await anext(stream)
        held = await client.inspect()
        await stream.aclose()
        return held

    held = asyncio.run(main())
    assert [request["id"] for request in held["requests"]] == ["leaving"]
    assert held["usage"]["slots_used"] == 1
    wait_until(lambda: client.stats().finished_total[FinishReason.ABORT] == 1)
    assert asyncio.run(client.inspect())["requests"] == []
    assert client.stats().slots_used == client.stats().blocks_used == 0


def test_a_killed_engine_fails_its_requests_and_is_replaced_once(launch):
    client = launch(faults.slow_steps)
    expected, first_pid = answer(client, message()), client.pid

    async def lose():
        stream = client.generate(message("lost", ignore_eos=True, max_tokens=200))
        await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        last = [output async for output in stream][-1]
        refusal = client.check_health()
        with pytest.raises(RequestError) as caught:
            client.generate(message())
        return last, refusal, caught.value

    last, refusal, error = asyncio.run(lose())
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the engine process was killed by SIGKILL and is being restarted"
    assert refusal == last.error
    assert error.status == 503
    wait_until(lambda: client.check_health() is None)
    assert not is_there(first_pid)
    assert client.pid != first_pid
    assert answer(client, message()) == expected
    assert client.stats().num_restarts_total == 1

    os.kill(client.pid, signal.SIGKILL)
    wait_until(lambda: "second time" in (client.check_health() or ""))
    assert "within 10 minutes, and stays down: restart the server" in client.check_health()
    with pytest.raises(RequestError, match="SIGKILL"):
        client.generate(message())


def test_an_engine_that_dies_long_after_it_was_replaced_is_replaced_again(launch):
    now_s = [0.0]
    client = launch(restart_window_s=100.0, clock=lambda: now_s[0])
    for count in (1, 2):
        now_s[0] += 101.0
        os.kill(client.pid, signal.SIGKILL)
        wait_until(lambda count=count: client.stats().num_restarts_total == count and client.check_health() is None)
    assert answer(client, message())[-1].is_finished


@pytest.mark.parametrize(
    ("fault", "words"),
    [(faults.raising_steps, "the engine died: RuntimeError: out of cheese"), (faults.crashing_steps, "SIGSEGV")],
)
def test_an_engine_that_dies_of_itself_is_told_apart(launch, fault, words):
    client = launch(fault)
    last = answer(client, message(ignore_eos=True, max_tokens=100))[-1]
    assert words in last.error
    wait_until(lambda: client.check_health() is None)
    answer(client, message(ignore_eos=True, max_tokens=100))
    wait_until(lambda: "second time" in (client.check_health() or ""))
    assert words in client.check_health()


def test_whoever_looks_at_an_engine_that_dies_is_told_so(launch):
    client = launch()

    async def main():
        os.kill(client.pid, signal.SIGSTOP)
        looking = asyncio.create_task(client.inspect())
        await asyncio.sleep(0.05)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="killed by SIGKILL") as caught:
            await looking
        return caught.value.status

    assert asyncio.run(main()) == 503


def test_an_engine_that_falls_silent_is_not_healthy_until_it_speaks_again(launch):
    now_s = [0.0]
    client = launch(clock=lambda: now_s[0])
    assert answer(client, message())[-1].is_finished
    os.kill(client.pid, signal.SIGSTOP)
    now_s[0] += 301.0
    assert client.check_health() == "the engine process has said nothing for 301 s"
    with pytest.raises(RequestError, match="said nothing"):
        client.generate(message())
    os.kill(client.pid, signal.SIGCONT)
    wait_until(lambda: client.check_health() is None)


@pytest.mark.parametrize("fault", [faults.nothing, faults.hanging_step], ids=["frozen", "hanging"])
def test_an_engine_that_hangs_for_good_is_killed_and_replaced(launch, fault, caplog):
    now_s = [0.0]
    client = launch(fault, clock=lambda: now_s[0], guard_s=0.01)
    first_pid = client.pid
    if fault is faults.nothing:
        os.kill(first_pid, signal.SIGSTOP)
    else:
        client._complained_s = 0.0  # as its watchdog will say after 300 s
    now_s[0] = 590.0
    time.sleep(0.1)
    assert client.pid == first_pid
    now_s[0] = 1201.0
    wait_until(lambda: client.stats().num_restarts_total == 1 and client.check_health() is None)
    assert client.pid != first_pid
    assert "the engine process is killed" in caplog.text
    if fault is faults.nothing:
        assert answer(client, message())[-1].is_finished
    else:
        os.kill(client.pid, signal.SIGKILL)  # it would not end by itself


def test_counters_go_on_when_an_engine_is_replaced(launch):
    client = launch()
    answer(client, message())
    wait_until(lambda: client.stats().generation_tokens_total == 12)
    before = client.stats()
    os.kill(client.pid, signal.SIGKILL)
    wait_until(lambda: client.stats().num_restarts_total == 1 and client.check_health() is None)
    answer(client, message())
    wait_until(lambda: client.stats().generation_tokens_total == 24)
    after = client.stats()
    assert after.time_to_first_token_s.count == 2
    assert after.finished_total[FinishReason.LENGTH] == 2
    assert after.num_steps_total > before.num_steps_total
    assert after.blocks_total == before.blocks_total


def test_a_full_queue_is_refused_here_and_what_never_ran_leaves_room(random_checkpoint):
    config = replace(CONFIG, max_num_seqs=1, max_waiting=0)
    client = ProcessClient(EngineSpec(random_checkpoint, config, 1, 300.0, faults.slow_steps), "narrow")
    client.start()

    async def main():
        for name in "ab":
            with pytest.raises(RequestError, match="structured_outputs"):
                await collect(client, BAD_GRAMMAR)
            stream = client.generate(message(name, ignore_eos=True, max_tokens=20))
            await anext(stream)
            with pytest.raises(RequestError) as caught:
                client.generate(message("late"))
            assert caught.value.status == 429
            assert [output async for output in stream][-1].is_finished

    asyncio.run(main())
    assert client.stats().num_rejected_total == 2
    client.stop(0)


def test_what_cannot_be_sent_or_read_ends_in_an_error_and_not_in_silence(launch, monkeypatch):
    client = launch()
    expected = answer(client, message())
    lost = answer(client, replace(message(), log_id=threading.Lock()))[-1]
    assert "killed by SIGKILL" in lost.error
    wait_until(lambda: client.check_health() is None)
    assert answer(client, message()) == expected
    monkeypatch.setattr(client._streams, "deliver", None)
    assert "the engine is lost: TypeError" in answer(client, message())[-1].error
    assert not is_there(client.pid)


def test_signals_of_a_terminal_or_a_supervisor_are_for_the_server(launch):
    client = launch()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(client.pid, number)
    assert answer(client, message())[-1].is_finished


@pytest.mark.parametrize(("timeout_s", "reason"), [(SOON_S, FinishReason.LENGTH), (0.0, FinishReason.ABORT)])
def test_stopping_lets_requests_finish_as_long_as_asked(launch, timeout_s, reason):
    client = launch(faults.slow_steps)

    async def main():
        stream = client.generate(message(ignore_eos=True, max_tokens=40))
        first = await anext(stream)
        stopping = asyncio.create_task(asyncio.to_thread(client.stop, timeout_s))
        outputs = [first] + [output async for output in stream]
        await stopping
        return outputs

    outputs = asyncio.run(main())
    assert outputs[-1].finish_reason is reason
    assert client.check_health() == "the engine is stopped"
    assert not is_there(client.pid)
    with pytest.raises(RequestError):
        client.generate(message())


def test_stopping_while_another_is_made_leaves_nothing(launch):
    client = launch()
    first_pid = client.pid
    os.kill(first_pid, signal.SIGKILL)
    wait_until(lambda: client.pid != first_pid)
    client.stop(SOON_S)
    assert not is_there(client.pid)


def test_what_a_person_can_cause_at_the_start_is_the_same_error(random_checkpoint, tmp_path):
    with pytest.raises(ConfigError) as expected:
        build_engine(tmp_path / "absent", CONFIG)
    with pytest.raises(ConfigError) as caught:
        ProcessClient(spec_of(tmp_path / "absent"), "absent")
    assert str(caught.value) == str(expected.value)
    spec = EngineSpec(random_checkpoint, EngineConfig(num_blocks=1, max_model_len=250), 1, 300.0, faults.nothing)
    with pytest.raises(CapacityError, match="num_blocks"):
        ProcessClient(spec, "small")


@pytest.mark.parametrize(("code", "words"), [(9, "ended with exit code 9"), (-11, "was killed by SIGSEGV")])
def test_a_crash_before_it_is_ready_says_how(random_checkpoint, code, words):
    prepare = partial(os._exit, code) if code > 0 else partial(signal.raise_signal, -code)
    with pytest.raises(EngineError, match=f"the engine process {words} before it was ready"):
        ProcessClient(spec_of(random_checkpoint, prepare), "random")


def test_exits_have_names():
    assert describe_exit(70) == "ended with exit code 70"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-99) == "was killed by signal 99"


SERVER = """
import sys, time
from pathlib import Path
from tests.engine.host.test_process import faults, spec_of
from perilune.engine.host.child import EngineChild
child = EngineChild(spec_of(Path(sys.argv[1]), getattr(faults, sys.argv[2])))
if sys.argv[3] == "ready":
    child.wait_until_ready()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_an_engine_whose_server_is_killed_ends_too(random_checkpoint, when):
    command = [sys.executable, "-c", SERVER, str(random_checkpoint), "nothing", when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        pid = int(server.stdout.readline())
        assert is_there(pid)
        server.kill()
    wait_until(lambda: not is_there(pid) or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())
