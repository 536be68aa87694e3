"""Ids for the tool calls of an answer."""

from collections.abc import Iterable


class CallIds:
    """Gives ids of the form `<name>_<number>`.

    The numbers go on from the calls that the conversation holds already, so that no id occurs twice in it.
    """

    def __init__(self, taken: Iterable[str]):
        self._taken = set(taken)

    def next(self, name: str) -> str:
        """The id of the next call, which is one of the tool `name`."""
        number = len(self._taken)
        while f"{name}_{number}" in self._taken:
            number += 1
        call_id = f"{name}_{number}"
        self._taken.add(call_id)
        return call_id
