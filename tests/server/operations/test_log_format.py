import io
import json
import logging

import pytest

from perilune.server.operations.log_format import CURRENT_REQUEST_ID, LogFormat, LogLevel, configure_logs


@pytest.fixture
def lines():
    """Set up logs and read their lines back; the loggers are as before afterwards."""
    root, own = logging.getLogger(), logging.getLogger("perilune")
    before = list(root.handlers), root.level, own.level

    def start(log_format, level=LogLevel.INFO):
        stream = io.StringIO()
        configure_logs(log_format, level, stream)
        return lambda: stream.getvalue().splitlines()

    yield start
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


def test_a_line_of_json_holds_the_request_and_what_was_given(lines):
    read = lines(LogFormat.JSON)
    token = CURRENT_REQUEST_ID.set("abc")
    logging.getLogger("perilune.x").info("two\nlines", extra={"status": 200})
    CURRENT_REQUEST_ID.reset(token)
    logging.getLogger("perilune.x").warning("no request")
    first, second = map(json.loads, read())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "perilune.x",
        "message": "two\nlines",
        "request_id": "abc",
        "status": 200,
    }
    assert (second["request_id"], second["level"]) == (None, "warning")


def test_whoever_logs_may_name_the_request(lines):
    read = lines(LogFormat.TEXT)
    logging.getLogger("perilune.x").info("of another thread", extra={"request_id": "xyz", "n": 3})
    (line,) = read()
    assert line.split(maxsplit=1)[1] == "INFO [xyz] of another thread n=3"


def test_a_message_cannot_forge_a_line_of_text(lines):
    read = lines(LogFormat.TEXT)
    logging.getLogger("perilune.x").info("a\r\n2026 ERROR [x] forged")
    (line,) = read()
    assert r"a\r\n2026 ERROR" in line


@pytest.mark.parametrize("log_format", LogFormat)
def test_an_exception_is_written_with_its_stack(lines, log_format):
    read = lines(log_format)
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("perilune.x").exception("failed")
    assert "KeyError: 'gone'" in "\n".join(read())
    assert len(read()) == 1 or log_format is LogFormat.TEXT


def test_levels_bind_our_lines_and_libraries_warn_at_least(lines):
    read = lines(LogFormat.TEXT, LogLevel.DEBUG)
    logging.getLogger("perilune.x").debug("ours")
    logging.getLogger("httpx").info("theirs")
    logging.getLogger("httpx").warning("their warning")
    assert [line.split("] ")[1] for line in read()] == ["ours", "their warning"]
    read = lines(LogFormat.TEXT, LogLevel.ERROR)
    logging.getLogger("perilune.x").warning("ours")
    logging.getLogger("httpx").warning("theirs")
    assert read() == []
