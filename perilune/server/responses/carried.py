"""Reasoning as `encrypted_content`: clients that keep nothing else of it send this back, so the model sees it again.

It is opaque to them, and no secret: they were shown the reasoning.
"""

import base64
import binascii

from perilune.errors import RequestError

ENCRYPTED = "reasoning.encrypted_content"
_PREFIX = "perilune."


def pack(reasoning: str) -> str:
    """What a client carries."""
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unpack(carried: str, field: str) -> str:
    """The reasoning that was packed; RequestError, naming the field, for what was not packed here."""
    try:
        if carried.startswith(_PREFIX):
            return base64.b64decode(carried.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise RequestError(f"{field} was not made by this server; leave the reasoning item out", param=field)
