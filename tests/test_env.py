from pathlib import Path

import pytest

from perilune import env
from perilune.errors import ConfigError


def test_known_variables_pass_the_check():
    env.check({variable.name: "x" for variable in env.VARIABLES} | {"HOME": "/root", "XPERILUNE_Y": "1"})


def test_an_unknown_variable_is_refused_with_the_near_one_named():
    with pytest.raises(ConfigError, match=r"unknown .* PERILUNE_APIKEY; known are .*did you mean PERILUNE_API_KEY\?"):
        env.check({"PERILUNE_APIKEY": "secret"})


def test_the_refusal_never_shows_a_value():
    with pytest.raises(ConfigError) as caught:
        env.check({"PERILUNE_APIKEY": "secret"})
    assert "secret" not in str(caught.value)


def test_a_variable_near_to_nothing_is_refused_too():
    with pytest.raises(ConfigError, match=r"PERILUNE_X.*: unset it"):
        env.check({"PERILUNE_X": ""})


def test_the_api_key_is_optional_but_never_blank():
    assert env.api_key({}) is None
    assert env.api_key({"PERILUNE_API_KEY": "k"}) == "k"
    with pytest.raises(ConfigError, match="PERILUNE_API_KEY is set but blank"):
        env.api_key({"PERILUNE_API_KEY": " "})


def test_goldens_have_a_default_place():
    assert env.goldens({}) == Path("../shared/golden")
    assert env.goldens({"PERILUNE_GOLDENS": "/x"}) == Path("/x")


def test_names_carry_the_prefix_and_are_unique():
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(name.startswith(env.PREFIX) for name in names)
