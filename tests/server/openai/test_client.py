"""The official `openai` client against the server."""

import threading

import openai
import pytest

from tests.server.conftest import DEADLINE_S, END, MODEL_NAME, THOUGHT

TURNS = [{"role": "user", "content": "hello"}]


@pytest.fixture
def talk(serve):
    """Start a server and give it with a client."""

    def start(*arguments, **options):
        server = serve(*arguments, **options)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
        return server, client

    return start


def test_an_answer(talk):
    _, client = talk(THOUGHT + "hello 你好" + END)
    answer = client.chat.completions.create(model=MODEL_NAME, messages=TURNS, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "hello 你好"
    assert answer.choices[0].message.reasoning_content == "hm🌙"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    assert [model.id for model in client.models.list()] == [MODEL_NAME]


def test_a_stream(talk):
    _, client = talk(THOUGHT + "hello 你好" + END)
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME, messages=TURNS, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "hello 你好"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm🌙"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens > 0


def test_completions(talk):
    _, client = talk("hello<|end_of_msg|>")
    whole = client.completions.create(model=MODEL_NAME, prompt=["a", "b"], logprobs=1, echo=True)
    assert [choice.text for choice in whole.choices] == ["ahello", "bhello"]
    streamed = client.completions.create(model=MODEL_NAME, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "hello"


def test_errors_are_those_that_the_client_knows(talk):
    _, client = talk()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL_NAME, messages=TURNS, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="sun", messages=TURNS)
    assert unknown.value.code == "model_not_found"


def test_sixteen_streams_at_once(talk, tokenizer):
    server, client = talk(THOUGHT + "hello 你好 world" + END, delay_s=0.002)
    texts = []

    def ask():
        stream = client.chat.completions.create(model=MODEL_NAME, messages=TURNS, stream=True)
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["hello 你好 world"] * 16
    server.wait_until_idle()


def test_leaving_a_stream_frees_its_request(talk, tokenizer):
    endless = tokenizer.encode("hello" * 40)
    server, client = talk(lambda request: endless, delay_s=0.05)
    with client.chat.completions.create(model=MODEL_NAME, messages=TURNS, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()
    assert server.engine.num_aborts == 1


def test_giving_up_before_the_first_byte_frees_the_request(talk):
    server, client = talk(delay_s=3600)
    for is_stream in (False, True):
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(model=MODEL_NAME, messages=TURNS, stream=is_stream)
        server.wait_until_idle()
    assert server.engine.num_aborts == 2
