"""Every failure in the shape that its route's clients expect.

OpenAI: {"error": {"message", "type", "param", "code"}}; Anthropic: {"type": "error", "error": {"type", "message"}}.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.errors import CapacityError, PeriluneError, RequestError

# what nginx logs for a client that went away; nobody is left to read it
CLIENT_CLOSED_REQUEST = 499
# what a client sent is quoted in the answer, and may be as large as a body
MAX_MESSAGE_LENGTH = 1000
MAX_PARAM_LENGTH = 200
LOG = logging.getLogger(__name__)
ENCODER = msgspec.json.Encoder()
ANTHROPIC_PATHS = ("/v1/messages", "/anthropic/")
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# what OpenAI answers when a request takes too long, and what Anthropic does
TIMEOUT, ANTHROPIC_TIMEOUT = 408, 504
OPENAI_TYPES = {TIMEOUT: "timeout_error", 429: "rate_limit_error"}


def error_status(error: Exception, path: str) -> int:
    """The HTTP status that answers `error` on `path`."""
    if isinstance(error, RequestError):
        is_late = error.status == TIMEOUT and path.startswith(ANTHROPIC_PATHS)
        return ANTHROPIC_TIMEOUT if is_late else error.status
    return 400 if isinstance(error, CapacityError) else 500


def error_body(error: Exception, path: str) -> bytes:
    """The JSON that describes `error` to clients of `path`."""
    content = _content(error, path)
    if not path.startswith(ANTHROPIC_PATHS):
        return ENCODER.encode({"error": content})
    status = error_status(error, path)
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error_code = content["code"]
    details = {} if error_code is None else {"details": {"error_code": error_code}}
    return ENCODER.encode({"type": "error", "error": {"type": kind, "message": content["message"], **details}})


def error_event(error: Exception, path: str) -> bytes:
    """The event that ends a stream of `path` which `error` has cut."""
    if path.startswith(ANTHROPIC_PATHS):
        return b"event: error\ndata: " + error_body(error, path) + b"\n\n"
    if path.startswith("/v1/responses"):
        return b"event: error\ndata: " + ENCODER.encode({**_content(error, path), "type": "error"}) + b"\n\n"
    return b"data: " + error_body(error, path) + b"\n\n"


def _content(error: Exception, path: str) -> dict[str, str | None]:
    """What went wrong; a failure of ours shows no detail, since it may hold another's data."""
    status = error_status(error, path)
    if isinstance(error, RequestError):
        param, code = error.param, error.code
    else:
        param, code = None, "capacity_exceeded" if isinstance(error, CapacityError) else None
    message = str(error) if isinstance(error, PeriluneError) else "the server failed to answer this request"
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, param = _cut(message, MAX_MESSAGE_LENGTH), None if param is None else _cut(param, MAX_PARAM_LENGTH)
    return {"message": message, "type": kind, "param": param, "code": code}


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def error_response(error: Exception, path: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error_body(error, path), error_status(error, path), headers, "application/json")


def _headers(error: Exception, status: int) -> dict[str, str]:
    """What clients act on besides the body."""
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if status in (TIMEOUT, ANTHROPIC_TIMEOUT):
        # the official clients would ask again, although the time is over
        return {"x-should-retry": "false"}
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        return {"Retry-After": str(error.retry_after_s)}
    return {}


class FaultBarrier:
    """Logs a fault of ours and answers 500, so that the connection stays usable."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = is_complete = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started, is_complete
            has_started = True
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched_send if scope["type"] == "http" else send)
        except Exception as error:
            if scope["type"] != "http" or (has_started and not is_complete):
                raise
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not has_started:
                await error_response(error, scope["path"])(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every exception, also those of its router, in the shape of the route."""

    async def answer_error(request: Request, error: Exception) -> Response:
        path = request.url.path
        return error_response(error, path, _headers(error, error_status(error, path)))

    async def answer_http(request: Request, error: Any) -> Response:
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            message = f"there is no {where}; GET /openapi.json lists what there is"
        elif error.status_code == 405:
            message = f"{where} is not allowed; use {(error.headers or {}).get('Allow', 'another method')}"
        else:
            message = str(error.detail)
        return error_response(RequestError(message, status=error.status_code), request.url.path, error.headers)

    async def answer_nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(PeriluneError, answer_error)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_middleware(FaultBarrier)
