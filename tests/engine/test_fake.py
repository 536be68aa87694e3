import asyncio

import pytest

from perilune.engine.client import ModelInfo
from perilune.engine.fake import FAKE_LOGPROB, FakeEngine
from perilune.engine.request import FinishReason, GenerateRequest, RequestOutput
from perilune.errors import RequestError
from perilune.sampling.params import SamplingParams

MODEL = ModelInfo("fake", max_model_len=16, vocab_size=100, eos_token_ids=(99,), created=0)


def engine(script, **options):
    fake = FakeEngine(MODEL, script, **options)
    fake.start()
    return fake


def message(request_id="r", prompt=(1, 2), **params):
    return GenerateRequest(request_id, prompt, SamplingParams(**params))


async def collect(fake, request):
    return [output async for output in fake.generate(request)]


def test_scripted_tokens_come_one_by_one_and_end_at_the_length():
    fake = engine(lambda request: [7, 8, 9])
    outputs = asyncio.run(collect(fake, message()))
    assert [output.token_ids for output in outputs] == [(7,), (8,), (9,)]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert [output.num_output_tokens for output in outputs] == [1, 2, 3]
    assert fake.stats().finished_total[FinishReason.LENGTH] == 1


@pytest.mark.parametrize(
    ("params", "expected", "reason", "stop_reason"),
    [
        ({}, (7, 99), FinishReason.STOP, None),
        ({"ignore_eos": True}, (7, 99, 9), FinishReason.LENGTH, None),
        ({"stop_token_ids": (7,)}, (7,), FinishReason.STOP, 7),
        ({"max_tokens": 1}, (7,), FinishReason.LENGTH, None),
    ],
)
def test_a_script_ends_where_an_engine_would(params, expected, reason, stop_reason):
    outputs = asyncio.run(collect(engine(lambda request: [7, 99, 9]), message(**params)))
    assert tuple(token for output in outputs for token in output.token_ids) == expected
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop_reason)


def test_scripted_outputs_are_sent_as_they_are():
    output = RequestOutput("r", (5,), None, None, FinishReason.ERROR, None, "planned", 2, 1, 1)
    assert asyncio.run(collect(engine(lambda request: [output]), message())) == [output]


def test_log_probabilities_are_made_up_as_asked_for():
    outputs = asyncio.run(collect(engine(lambda request: [7]), message(logprobs=2, prompt_logprobs=0)))
    (entry,) = outputs[0].logprobs
    assert (entry.token_id, entry.logprob, len(entry.top)) == (7, FAKE_LOGPROB, 2)
    assert [item and item.token_id for item in outputs[0].prompt_logprobs] == [None, 2]


def test_a_stream_that_is_closed_early_counts_as_an_abort():
    fake = engine(lambda request: [7] * 10)

    async def main():
        stream = fake.generate(message())
        await anext(stream)
        assert fake.stats().num_running == 1
        await stream.aclose()

    asyncio.run(main())
    assert fake.num_aborts == 1
    assert fake.stats().num_running == 0


def test_an_abort_ends_the_stream_with_reason_abort():
    fake = engine(lambda request: [7] * 10)

    async def main():
        stream = fake.generate(message())
        await anext(stream)
        fake.abort("r")
        return [output async for output in stream]

    outputs = asyncio.run(main())
    assert [(output.token_ids, output.finish_reason, output.num_output_tokens) for output in outputs] == [
        ((), FinishReason.ABORT, 1)
    ]
    assert fake.num_aborts == 1


def test_the_limits_of_the_model_and_what_a_script_raises_come_from_the_call_itself():
    def refuse(request):
        raise RequestError("no", status=429)

    with pytest.raises(RequestError, match="context"):
        engine(lambda request: [7]).generate(message(prompt=(1,) * 16))
    with pytest.raises(RequestError, match="no"):
        engine(refuse).generate(message())


def test_an_engine_that_is_not_running_says_so():
    fake = FakeEngine(MODEL, lambda request: [7])
    assert fake.check_health() == "the engine is not started"
    with pytest.raises(RequestError, match="not started"):
        fake.generate(message())
    fake.start()
    assert fake.check_health() is None
    fake.stop(0)
    assert fake.check_health() == "the engine is stopped"
