"""`perilune chat`: the conversation it keeps, what Ctrl-C does, and talking to a server."""

import io
import signal

import pytest

from perilune.cli.backend import LocalBackend, UrlBackend
from perilune.cli.chat import Conversation
from perilune.config.engine import EngineConfig
from perilune.errors import ConfigError, RequestError
from perilune.sampling.params import SamplingParams
from perilune.server.settings import ServerSettings
from perilune.text.channels import Channel
from tests.server.conftest import END, MODEL_NAME, THOUGHT


class StubBackend:
    """Says what it was given to say; `asked` holds every conversation and effort."""

    def __init__(self, *answers):
        self.asked = []
        self._answers = list(answers)

    def answer(self, messages, effort, params, show):
        self.asked.append(([(turn["role"], turn["content"]) for turn in messages], effort))
        self.turns = messages
        answer = self._answers.pop(0)
        if isinstance(answer, tuple):
            show(Channel.REASONING, answer[0])
            show(Channel.CONTENT, answer[1])
            return "stop"
        show(Channel.CONTENT, "part")
        raise answer

    def close(self):
        pass


def talk(monkeypatch, backend, *lines, effort="max", system=None, is_interactive=False):
    if is_interactive:
        inputs = iter(lines)

        def read(prompt):
            line = next(inputs, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
    else:
        monkeypatch.setattr("sys.stdin", [f"{line}\n" for line in lines])
    Conversation(backend, SamplingParams(), effort, system, is_interactive=is_interactive).run()


def test_every_turn_sees_the_ones_before_it(monkeypatch, capsys):
    backend = StubBackend(("hm", "one"), ("", "two"))
    talk(monkeypatch, backend, "a", "", "b", system="s")
    assert backend.asked == [
        ([("system", "s"), ("user", "a")], "max"),
        ([("system", "s"), ("user", "a"), ("assistant", "one"), ("user", "b")], "max"),
    ]
    assert backend.turns[2]["reasoning_content"] == "hm"
    printed = capsys.readouterr()
    assert printed.out == "one\ntwo\n"
    assert printed.err == "hm\n\n"


def test_reset_forgets_all_but_the_system_message(monkeypatch):
    backend = StubBackend(("", "one"), ("", "two"))
    talk(monkeypatch, backend, "a", "/reset", "b", system="s")
    assert backend.asked[1][0] == [("system", "s"), ("user", "b")]


def test_thinking_can_be_switched(monkeypatch):
    backend = StubBackend(("", "1"), ("", "2"), ("", "3"))
    talk(monkeypatch, backend, "a", "/think off", "b", "/think on", "c", effort="low")
    assert [effort for _, effort in backend.asked] == ["low", "none", "low"]


def test_quit_ends_and_unknown_commands_are_told_of(monkeypatch, capsys):
    backend = StubBackend()
    talk(monkeypatch, backend, "/sing", "/quit", "a")
    assert backend.asked == []
    assert "/sing" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(monkeypatch, capsys):
    backend = StubBackend(KeyboardInterrupt(), ("", "two"))
    talk(monkeypatch, backend, "a", KeyboardInterrupt(), "b", is_interactive=True)
    assert backend.asked[1][0] == [("user", "a"), ("assistant", "part"), ("user", "b")]
    assert "stopped" in capsys.readouterr().err


def test_an_error_ends_a_script_and_not_a_conversation(monkeypatch, capsys):
    talk(monkeypatch, StubBackend(RequestError("too long"), ("", "two")), "a", "b", is_interactive=True)
    assert "too long" in capsys.readouterr().err
    with pytest.raises(RequestError, match="too long"):
        talk(monkeypatch, StubBackend(RequestError("too long")), "a", "b")


def test_input_that_is_no_text_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(ConfigError, match="not text in utf-8"):
        Conversation(StubBackend(), SamplingParams(), "max", None, is_interactive=False).run()


def test_reasoning_is_dimmed_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    talk(monkeypatch, StubBackend(("hm", "one")), "a")
    printed = capsys.readouterr()
    assert "\033[2mhm\033[0m" in printed.err
    assert printed.out == "one\n"


class Heard:
    def __init__(self):
        self.text = {Channel.REASONING: "", Channel.CONTENT: ""}

    def __call__(self, channel, text):
        self.text[channel] += text


def test_a_server_is_talked_to(serve):
    server = serve(THOUGHT + "hello 你好" + END, settings=ServerSettings(api_key="k"))
    for url in (server.url, f"{server.url}/v1/", server.url.removeprefix("http://")):
        heard = Heard()
        backend = UrlBackend(url, None, "k")
        reason = backend.answer([{"role": "user", "content": "a"}], "low", SamplingParams(max_tokens=99), heard)
        assert reason == "stop"
        assert heard.text == {Channel.REASONING: "hm🌙", Channel.CONTENT: "hello 你好"}
    assert server.engine.requests[0].params.max_tokens == 99


def test_errors_of_a_server_are_told(serve):
    server = serve(settings=ServerSettings(api_key="k"))
    with pytest.raises(RequestError, match=r"401.*API key"):
        UrlBackend(server.url, None, None)
    with pytest.raises(RequestError, match=rf"404.*{MODEL_NAME}"):
        UrlBackend(server.url, "sun", "k").answer([{"role": "user", "content": "a"}], "max", SamplingParams(), Heard())
    with pytest.raises(RequestError, match="404"):
        UrlBackend(f"{server.url}/elsewhere", None, "k")
    with pytest.raises(ConfigError, match="--url"):
        UrlBackend("http://", None, None)


@pytest.mark.parametrize("event", [[], {"choices": [{}]}, {"choices": 5}, {"error": "no"}], ids=str)
def test_a_server_of_another_kind_is_an_error(monkeypatch, event):
    def events(*_):
        yield event

    monkeypatch.setattr(UrlBackend, "_events", events)
    with pytest.raises(RequestError, match="http://host sends what no chat answer holds"):
        UrlBackend("http://host", "m", None).answer([], "max", SamplingParams(), Heard())


@pytest.fixture
def interruptible():
    """Tests that a shell has started in the background ignore SIGINT; these need it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", ["local", "url"])
def test_an_interrupted_answer_frees_its_request(kind, request, serve):
    if kind == "url":
        server = serve(THOUGHT + "hello" * 50 + END, delay_s=0.02)
        backend, stats = UrlBackend(server.url, None, None), server.engine.stats
    else:
        config = EngineConfig(dtype="float32", max_model_len=1024, max_num_seqs=1)
        backend = LocalBackend(request.getfixturevalue("tiny_checkpoint"), config, None)
        stats = backend._client.stats
    with pytest.raises(KeyboardInterrupt):
        backend.answer(
            [{"role": "user", "content": "a"}],
            "max",
            SamplingParams(ignore_eos=True),
            lambda channel, text: signal.raise_signal(signal.SIGINT),
        )
    while stats().num_running:
        pass
    backend.close()
