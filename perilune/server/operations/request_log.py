"""Every request gets an id, which its answer and its log lines carry, and a line when it has ended."""

import logging
import re
import secrets
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.server.operations.log_format import CURRENT_REQUEST_ID

LOG = logging.getLogger(__name__)
HEADER = b"x-request-id"
# what supervisors ask every few seconds
QUIET_PATHS = ("/health", "/metrics")
ALLOWED = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# the status of an answer that was never begun: the client was gone
CLIENT_CLOSED_REQUEST = 499


def choose_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own id, or a new one where it sends none or one that would not stay on its line of a log."""
    for name, value in headers:
        text = value.decode("latin-1")
        if name.lower() == HEADER and ALLOWED.fullmatch(text):
            return text
    return f"req-{secrets.token_hex(12)}"


class RequestLog:
    """Gives requests their ids and logs method, path, status and milliseconds of each."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, status, began_s = choose_id(scope["headers"]), CLIENT_CLOSED_REQUEST, time.monotonic()
        is_complete = False

        async def marked_send(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, request_id.encode())]}
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        token = CURRENT_REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, marked_send)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            fields = {"status": status, "ms": round((time.monotonic() - began_s) * 1e3, 1), "complete": is_complete}
            LOG.log(level, "%s %s", scope["method"], scope["path"], extra=fields)
            CURRENT_REQUEST_ID.reset(token)
