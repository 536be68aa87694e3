import pytest

from perilune.errors import ConfigError
from perilune.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [("api_key", " "), ("max_body_bytes", 0), ("max_messages", 0), ("max_choices", -1), ("drain_timeout_s", -1.0)],
)
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(ConfigError, match=field):
        ServerSettings(**{field: value})


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_request_timeout_is_a_number_of_seconds_above_zero(seconds):
    with pytest.raises(ConfigError, match="request_timeout_s is"):
        ServerSettings(request_timeout_s=seconds)
    assert ServerSettings(request_timeout_s=0.5).request_timeout_s == 0.5


def test_a_drain_timeout_is_a_number_of_seconds():
    with pytest.raises(ConfigError, match="drain_timeout_s is nan"):
        ServerSettings(drain_timeout_s=float("nan"))
    assert ServerSettings(drain_timeout_s=0).drain_timeout_s == 0
