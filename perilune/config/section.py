"""A strict reader over one object of a JSON file: every key must be asked for, every value checked.

Knows nothing about models; errors name the full key, what was found and what is allowed.
"""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

from perilune.errors import ConfigError

_MISSING = object()


class Section:
    """One JSON object whose keys are consumed one by one; `finish` refuses what nobody asked for."""

    def __init__(self, values: object, name: str = "", ignored: Iterable[str] = ()) -> None:
        self.name = name
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name or 'the configuration'} must be a JSON object, found {shown(values)}")
        self._values: Mapping[str, Any] = values
        self._ignored = frozenset(ignored)
        self._asked: set[str] = set()

    def full_key(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def skip(self, *keys: str) -> None:
        """Accepts keys whose value has no effect."""
        self._asked.update(keys)

    def get(self, key: str, default: Any = _MISSING) -> Any:
        self._asked.add(key)
        value = self._values.get(key, default)
        if value is _MISSING:
            raise ConfigError(f"{self.full_key(key)} is missing; it is required")
        return value

    def section(self, key: str, ignored: Iterable[str] = ()) -> Self:
        return type(self)(self.get(key), self.full_key(key), ignored)

    def integer(self, key: str, *, minimum: int = 1, default: int | None = None) -> int:
        value = self.get(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.refuse(key, value, f"an integer of at least {minimum}")
        return int(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value <= 0:
            self.refuse(key, value, "a number above 0")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(key, value, "a finite number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return bool(value)

    def fixed(self, key: str, *allowed: object, optional: bool = False) -> None:
        """Demands one of the supported values; an absent optional key counts as supported."""
        value = self.get(key, allowed[0]) if optional else self.get(key)
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            self.refuse(key, value, " or ".join(shown(choice) for choice in allowed))

    def layers(self, key: str, num_layers: int) -> tuple[int, ...]:
        """Reads a one-based, strictly ascending list of layers; returns zero-based indices."""
        value = self.get(key)
        expected = f"an ascending list of one-based layer numbers from 1 to {num_layers}"
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            self.refuse(key, value, expected)
        if any(not 1 <= x <= num_layers for x in value) or sorted(set(value)) != value:
            self.refuse(key, value, expected)
        return tuple(x - 1 for x in value)

    def refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        raise ConfigError(f"{self.full_key(key)} is {shown(value)}; allowed: {allowed}")

    def finish(self) -> None:
        """Raises ConfigError for the first key that is neither known nor listed as without effect."""
        for key in self._values:
            if key in self._asked or key in self._ignored:
                continue
            near = difflib.get_close_matches(key, self._asked, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"{self.full_key(key)} is not a known key{hint}; allowed here: {', '.join(sorted(self._asked))}"
                + (" and the library defaults without effect" if self._ignored else "")
            )


def shown(value: object) -> str:
    """Renders a found value as JSON, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
