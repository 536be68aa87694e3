import asyncio
import logging

import pytest

from perilune.engine.client import InProcessClient
from perilune.engine.host.watchdog import Watchdog
from perilune.errors import RequestError
from tests.engine.counting_model import expected_tokens, make_core, tokens_of
from tests.engine.test_client import MODEL, Gate, collect, message, until


class Case:
    """A watchdog whose step and clock a test moves."""

    def __init__(self):
        self.now_s, self.began_s = 0.0, None
        self.told, self.num_dumps = [], 0
        self.dog = Watchdog(
            10.0,
            lambda: self.began_s,
            lambda: ["a", "b"],
            tell=self.told.append,
            clock=lambda: self.now_s,
            dump_stacks=self.dump,
        )

    def dump(self):
        self.num_dumps += 1

    def look(self, now_s, began_s):
        self.now_s, self.began_s = now_s, began_s
        self.dog.look()
        return self.dog.complaint


def test_steps_that_end_in_time_and_pauses_are_no_complaint():
    case = Case()
    for began_s in (1.0, None, 5.0, None, 1000.0):
        assert case.look((began_s or 2000.0) + 10.0, began_s) is None
    assert (case.told, case.num_dumps) == ([], 0)


def test_a_step_that_hangs_is_reported_once_with_its_requests_until_it_ends(caplog):
    caplog.set_level(logging.WARNING)
    case = Case()
    assert "more than 10 s" in case.look(10.1, 0.0)
    case.look(50.0, 0.0)
    assert case.num_dumps == 1
    assert case.look(60.0, None) is None
    assert case.told == ["a step of the engine has been running for more than 10 s", None]
    report, end = caplog.records
    assert report.request_id == "a b"
    assert "has ended after 60 s" in end.getMessage()


def test_the_next_step_may_hang_too():
    case = Case()
    case.look(11.0, 0.0)
    assert case.look(12.0, 11.5) is None
    assert case.look(30.0, 11.5) is not None
    assert case.num_dumps == 2


def test_health_is_bad_while_a_step_hangs_and_the_request_goes_on_afterwards(capfd):
    core, _ = make_core()
    gate = Gate(core)
    client = InProcessClient(core, MODEL, step_timeout_s=0.05)
    client.start()

    async def main():
        gate.close()
        reading = asyncio.create_task(collect(client, message("r", [1], max_tokens=5)))
        await until(lambda: client.check_health() is not None)
        assert "a step of the engine has been running" in client.check_health()
        with pytest.raises(RequestError) as caught:
            client.generate(message("s", [2]))
        assert caught.value.status == 503
        gate.open()
        outputs = await reading
        await until(lambda: client.check_health() is None)
        return outputs

    assert tokens_of(asyncio.run(main())) == expected_tokens([1], 5)
    client.stop(0)
    assert "Thread 0x" in capfd.readouterr().err
