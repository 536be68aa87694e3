"""Reads fields of untyped JSON; what is wrong is a RequestError that names the field."""

import json
from collections.abc import Collection, Mapping, Sequence

from perilune.errors import RequestError
from perilune.text.tokenizer import check_encodable

_MAX_SHOWN_CHARS = 80


def read_object(value: object, field: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise wrong_type(value, "an object", field)
    return value


def read_list(value: object, field: str, of: str) -> Sequence[object]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise wrong_type(value, f"a list of {of}", field)
    return value


def read_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, "a string", field)
    check_encodable(value, param=field)
    return value


def read_name(value: object, field: str) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{field} is {shown(value)}, expected a string that is not empty", param=field)
    check_encodable(value, param=field)
    return value


def read_flag(value: object, field: str) -> bool:
    """True or false; null is false."""
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{field} is {shown(value)}, expected true or false", param=field)
    return bool(value)


def check_keys(given: Mapping[str, object], allowed: Collection[str], owner: str, field: str) -> None:
    """Refuse what `owner` does not have; keys without a value (null, []) are what clients echo and say nothing."""
    for key, value in given.items():
        if key not in allowed and value is not None and value != []:
            raise RequestError(
                f"{field}.{key} is not a field of {owner}; allowed are {', '.join(allowed)}", param=f"{field}.{key}"
            )


def wrong_type(value: object, expected: str, field: str) -> RequestError:
    return RequestError(f"{field} is {type(value).__name__}, expected {expected}", param=field)


def shown(value: object) -> str:
    """A wrong value as a message shows it, cut where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of too many digits
        return f"some {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def json_fence(value: object, field: str) -> str:
    """JSON as the model reads it: keys sorted at every depth, no blanks, in a fenced block."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise not_json(error, field) from error
    check_encodable(text, param=field)
    return f"```json\n{text}\n```"


def not_json(error: Exception, field: str) -> RequestError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return RequestError(f"{field} cannot be written as JSON: {reason}", param=field)
