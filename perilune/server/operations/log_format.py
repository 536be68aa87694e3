"""How log lines look: one line of text, or one JSON object, for each; and which request they belong to."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from enum import StrEnum
from typing import TextIO

# the id of the API request that the running task serves; log records of it carry the id without being told
CURRENT_REQUEST_ID: ContextVar[str | None] = ContextVar("perilune_request_id", default=None)

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "taskName"}


class LogFormat(StrEnum):
    """For people, or for programs."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least serious lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _RequestId(logging.Filter):
    """Marks records with the request they belong to, unless whoever logs has said it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if "request_id" not in vars(record):
            record.request_id = CURRENT_REQUEST_ID.get()
        return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What was given as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """Time, level, request, message, and what was given as `extra`; line breaks of a message stay visible as such."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        parts = [_time(record), record.levelname, f"[{request_id}]" if request_id else "[-]"]
        parts.append(record.getMessage().replace("\r", "\\r").replace("\n", "\\n"))
        parts += [f"{name}={value}" for name, value in _fields(record).items()]
        line = " ".join(parts)
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One object per record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            **_fields(record),
        }
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure_logs(log_format: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Send all log lines of this process to `stream` (stderr) in one format; those of libraries from warnings on."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    handler.addFilter(_RequestId())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("perilune").setLevel(level.upper())
