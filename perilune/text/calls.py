"""The arguments of a tool call as JSON text, written while the model is still producing them."""

import json
import re
from collections.abc import Mapping
from enum import Enum, auto

_SURROGATE = re.compile("[\ud800-\udfff]")


class _Value(Enum):
    """What the text that comes next belongs to."""

    NOTHING = auto()
    STRING = auto()
    OTHER = auto()
    BLOCK = auto()


class CallWriter:
    """One call. Every method gives the text that it adds; all of them together are the arguments.

    Strings are written as they come, values of other types when they end, so that they come out the same however
    the model spelt them. An argument that occurs twice is written twice: for a reader of JSON the last one counts.
    """

    def __init__(self, index: int):
        self.index = index
        self._value = _Value.NOTHING
        self._buffer: list[str] = []
        self._has_arguments = False
        self._blocks: list[str] = []

    def begin_argument(self, attributes: Mapping[str, str]) -> str:
        """An argument without a key is dropped; one without a type is a string."""
        key = attributes.get("key")
        if key is None:
            return ""
        is_string = attributes.get("type", "string") == "string"
        self._value = _Value.STRING if is_string else _Value.OTHER
        before = ", " if self._has_arguments else "{"
        self._has_arguments = True
        return f"{before}{_dump(key)}: " + ('"' if is_string else "")

    def begin_block(self) -> None:
        """All arguments as one piece of JSON; it counts where it is all that the call holds."""
        self._value = _Value.BLOCK

    def push(self, text: str) -> str:
        """Text of the argument or block."""
        if self._value is _Value.STRING:
            return _dump(text)[1:-1]
        if self._value is not _Value.NOTHING:
            self._buffer.append(text)
        return ""

    def end_value(self) -> str:
        """The argument or block, if there is one, has ended."""
        value, self._value = self._value, _Value.NOTHING
        raw = "".join(self._buffer)
        self._buffer.clear()
        if value is _Value.BLOCK:
            self._blocks.append(raw)
        if value is _Value.OTHER:
            return _redump(raw)
        return '"' if value is _Value.STRING else ""

    def close(self) -> str:
        """The call has ended, and a value that has not with it."""
        text = self.end_value()
        if self._has_arguments:
            return text + "}"
        return _whole(self._blocks[0]) if len(self._blocks) == 1 else "{}"


def _dump(value: object) -> str:
    """JSON in the one style used for arguments; ValueError for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # half a character, which only an escape can spell, could be neither sent nor sent back
    return _SURROGATE.sub("\ufffd", text)


def _load(raw: str) -> object:
    return json.loads(raw, parse_constant=_refuse)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def _redump(raw: str) -> str:
    """A value in the common style; text that is no JSON becomes a string."""
    try:
        return _dump(_load(raw))
    except (ValueError, RecursionError):
        return _dump(raw)


def _whole(raw: str) -> str:
    """A block in the common style. What is no object is handed on as it stands: its reader is to judge it."""
    if not raw.strip():
        return "{}"
    try:
        value = _load(raw)
        return _dump(value) if isinstance(value, dict) else raw
    except (ValueError, RecursionError):
        return raw
