"""What the profiles of a server allow: the lists of Moonshot's service and of its verifier."""

import pytest

from perilune.errors import ConfigError
from perilune.server.settings import ServerSettings
from tests.server.conftest import END, THOUGHT

OFF = {"thinking": {"type": "disabled"}}


@pytest.fixture
def ask(serve):
    def start(profile):
        return serve(THOUGHT + "hello" + END, settings=ServerSettings(profile=profile)).chat

    return start


@pytest.mark.parametrize("profile", ["kimi", "kvv"])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.1},
        {"temperature": 2.0},
        {"temperature": -0.1},
        {"top_p": 0.8},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"n": 2},
        {"stop": ["a"] * 6},
        {"stop": "a" * 33},
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]},
    ],
)
def test_a_value_that_the_profile_fixes_is_refused(ask, profile, fields):
    error = ask(profile)(**fields)
    assert error.status_code == 400
    assert error.json()["error"]["type"] == "invalid_request_error"
    assert error.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize(
    ("profile", "fields"),
    [
        *[(name, {}) for name in ("open", "kimi", "kvv")],
        *[(name, {"temperature": 1.0, "top_p": 0.95, "n": 1}) for name in ("open", "kimi", "kvv")],
        *[(name, {"presence_penalty": 0, "frequency_penalty": 0.0}) for name in ("open", "kimi", "kvv")],
        *[("kvv", {"temperature": value, **off}) for value in (0.0, 0.6, 1.0) for off in ({}, OFF)],
        ("kvv", {"reasoning_effort": "none"}),
        ("open", {"temperature": 1.1, "top_p": 0.8, "n": 2, "presence_penalty": 0.5, **OFF}),
    ],
)
def test_a_value_that_the_profile_allows_is_taken(ask, profile, fields):
    assert ask(profile)(**fields).status_code == 200


@pytest.mark.parametrize("fields", [{"temperature": 0.6}, {"temperature": 0.0}, OFF, {"reasoning_effort": "none"}])
def test_kimi_always_thinks_at_one_temperature(ask, fields):
    assert ask("kimi")(**fields).status_code == 400


def test_an_answer_has_the_default_length_of_the_service(serve):
    server = serve(settings=ServerSettings(profile="kimi"))
    assert server.chat().status_code == 200
    assert server.engine.requests[0].params.max_tokens == 131072


def test_an_unknown_profile_is_refused():
    with pytest.raises(ConfigError, match="open, kimi, kvv"):
        ServerSettings(profile="what")
