"""A marker in the model's output with the tag that follows it, as in `<|open|>call tool="f" index="1"<|sep|>`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

TAGS = ("message", "think", "response", "tools", "call", "argument", "json")

# A marker whose tag has not ended after so many bytes was a stray one, and what follows it is text; names of tools
# and arguments may be longer.
MAX_HEADER_BYTES = 1024
MAX_NAMED_HEADER_BYTES = 65_536

_NAMED = re.compile(rb'(?:call|argument) [a-z]+="')
_ATTRIBUTE = re.compile(r'\s([\w-]+)="([^"]*)"')
_COMPLETE = rf"(?:{'|'.join(TAGS)})(?:{_ATTRIBUTE.pattern})*"
_WHOLE = re.compile(_COMPLETE)
_CUT = re.compile(rf'{_COMPLETE}(?:\s(?:[\w-]+(?:=(?:"[^"]*)?)?)?)?')


@dataclass
class Header:
    """A marker and the tag bytes collected after it."""

    is_open: bool
    token_ids: list[int]
    raw: bytearray = field(default_factory=bytearray)

    @property
    def is_too_long(self) -> bool:
        if len(self.raw) <= MAX_HEADER_BYTES:
            return False
        return len(self.raw) > MAX_NAMED_HEADER_BYTES or not (self.is_open and _NAMED.match(self.raw))

    def tag(self, *, has_sep: bool) -> str | None:
        """The known tag named here. Without its separator it must be well-formed; a closing one is a bare name."""
        text = self._text
        name = text.partition(" ")[0]
        is_whole = name == text or (self.is_open and (has_sep or _WHOLE.fullmatch(text) is not None))
        return name if name in TAGS and is_whole else None

    @property
    def can_become_tag(self) -> bool:
        text = self._text
        return any(tag.startswith(text) for tag in TAGS) or (self.is_open and _CUT.fullmatch(text) is not None)

    @property
    def attributes(self) -> Mapping[str, str]:
        """Values by name, unescaped; what is no attribute is passed over."""
        found = _ATTRIBUTE.findall(self._text)
        return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}

    @property
    def _text(self) -> str:
        return self.raw.decode(errors="replace")
