"""Where the fields of a chat request came from, for requests of another dialect that are read as one."""

from collections.abc import Iterator
from contextlib import contextmanager

from perilune.errors import RequestError


class Places:
    """Names of chat fields with the names that the client used; a longer name counts before a shorter one."""

    def __init__(self, **names: str):
        self._names = dict(names)

    def note(self, chat_field: str, given_field: str) -> None:
        """Remember that `chat_field`, and all below it, was `given_field` in the client's request."""
        self._names[chat_field] = given_field

    def given(self, chat_field: str) -> str:
        """The client's name for a field of the chat request."""
        for name in sorted(self._names, key=len, reverse=True):
            if chat_field == name or chat_field.startswith((f"{name}.", f"{name}[")):
                return self._names[name] + chat_field[len(name) :]
        return chat_field

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Let errors from inside name the client's fields."""
        try:
            yield
        except RequestError as error:
            if error.param is None:
                raise
            param = self.given(error.param)
            message = str(error).replace(error.param, param)
            raise RequestError(message, param=param, status=error.status, code=error.code) from error
