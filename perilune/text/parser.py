"""Splits generated token ids into reasoning and content.

Driven by ids: only the real control tokens act, text that merely spells one stays text. Told its start state, never
guesses it; never raises; shows whatever it cannot place rather than losing it. The tools channel is dropped.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from perilune.text.channels import Channel, Delta
from perilune.text.tokenizer import Detokenizer, Tokenizer

TAGS = ("message", "think", "response", "tools", "call", "argument", "json")

# A marker whose tag has not ended after so many bytes was a stray one, and what follows it is text.
MAX_HEADER_BYTES = 1024


class _State(Enum):
    PLAIN = auto()  # no channels at all
    REASONING = auto()
    BETWEEN = auto()
    RESPONSE = auto()
    TOOLS = auto()
    DONE = auto()


_START: Mapping[Channel, _State] = {
    Channel.TEXT: _State.PLAIN,
    Channel.REASONING: _State.REASONING,
    Channel.CONTENT: _State.RESPONSE,
}

# (state, is_open, tag) -> next state; every other known tag is a marker without effect.
_NEXT: Mapping[tuple[_State, bool, str], _State] = {
    (_State.REASONING, False, "think"): _State.BETWEEN,
    (_State.REASONING, False, "response"): _State.BETWEEN,
    (_State.REASONING, False, "message"): _State.DONE,
    (_State.REASONING, True, "response"): _State.RESPONSE,
    (_State.REASONING, True, "tools"): _State.TOOLS,
    (_State.BETWEEN, True, "response"): _State.RESPONSE,
    (_State.BETWEEN, True, "tools"): _State.TOOLS,
    (_State.BETWEEN, False, "message"): _State.DONE,
    (_State.RESPONSE, False, "response"): _State.BETWEEN,
    (_State.RESPONSE, True, "tools"): _State.TOOLS,
    (_State.RESPONSE, False, "message"): _State.DONE,
    (_State.TOOLS, False, "tools"): _State.BETWEEN,
    (_State.TOOLS, True, "response"): _State.RESPONSE,
    (_State.TOOLS, False, "message"): _State.DONE,
}

# Closing these while still in the reasoning shows that the model answered without thinking.
_CLOSERS_OF_CONTENT = ("response", "message")


@dataclass
class _Header:
    """A marker and the tag bytes collected after it."""

    is_open: bool
    token_ids: list[int]
    raw: bytearray = field(default_factory=bytearray)

    @property
    def tag(self) -> str | None:
        """The known tag named here; a closing one must be the bare name."""
        name, _, attributes = self.raw.decode(errors="replace").partition(" ")
        return name if name in TAGS and (self.is_open or not attributes) else None

    @property
    def can_become_tag(self) -> bool:
        name = self.raw.decode(errors="replace")
        return any(tag.startswith(name) for tag in TAGS)


class ChannelParser:
    """Turns one generation's ids into deltas: one per token, or more tokens where they share a character.

    Without any marker a generation that started in the reasoning and stopped by itself was an answer, and so was one
    that closes a response or message it never opened. The reasoning has been handed out by then; its text is given
    once more as content, marked `is_resent`, so that the content is whole however the deltas are read.
    """

    def __init__(self, tokenizer: Tokenizer, start: Channel):
        self._tokenizer = tokenizer
        self._state = _START[start]
        self._openers = (tokenizer.open_id, tokenizer.close_id)
        self._detokenizer = Detokenizer(tokenizer)
        self._pending_ids: list[int] = []  # their bytes do not make a character yet
        self._header: _Header | None = None
        self._has_marker = False
        self._reasoning: list[str] = []
        self._blanks: list[Delta] = []  # since the last channel ended, while there is nothing but blanks
        self._out: list[Delta] = []

    def push(self, ids: Iterable[int]) -> list[Delta]:
        """Deltas completed by these ids."""
        for token_id in ids:
            if self._tokenizer.is_special(token_id):
                self._take_control(token_id)
            elif self._header is not None:
                self._collect(self._header, token_id)
            else:
                self._take_text(token_id)
        return self._drain()

    def flush(self, finish: str | None) -> list[Delta]:
        """Everything still held, at the end of a generation that finished with "stop", "length" or otherwise."""
        self._end_header(is_last=True)
        self._end_character()
        if finish == "stop":
            self._end_unmarked_reasoning()
        self._drop_blanks()
        return self._drain()

    def _drain(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _take_control(self, token_id: int) -> None:
        is_end = token_id in self._tokenizer.eos_token_ids
        if self._state is _State.PLAIN or not (is_end or token_id in self._openers or self._header):
            self._end_character()
            self._markup(token_id)
        elif token_id in self._openers:
            self._end_header()
            self._end_character()
            self._has_marker = True
            self._header = _Header(token_id == self._tokenizer.open_id, [token_id])
        elif is_end:
            self._end_header()
            self._end_character()
            self._end_unmarked_reasoning()
            self._drop_blanks()
            self._state = _State.DONE
            self._markup(token_id)
        elif self._header is not None:
            self._header.token_ids.append(token_id)
            if token_id == self._tokenizer.sep_id:
                self._end_header(has_sep=True)

    def _collect(self, header: _Header, token_id: int) -> None:
        header.token_ids.append(token_id)
        header.raw += self._tokenizer.token_bytes(token_id)
        if len(header.raw) > MAX_HEADER_BYTES:
            self._header = None
            self._release(header)

    def _end_header(self, *, has_sep: bool = False, is_last: bool = False) -> None:
        """Act on a collected header; one that ran into the next marker without its separator counts too."""
        header, self._header = self._header, None
        if header is None:
            return
        if header.tag is not None:
            self._enter(header.is_open, header.tag)
            self._markup(*header.token_ids)
        elif has_sep or (is_last and header.can_become_tag):
            self._markup(*header.token_ids)
        else:
            self._release(header)

    def _release(self, header: _Header) -> None:
        """The marker was a stray one: drop it and keep what followed as text."""
        for token_id in header.token_ids:
            if self._tokenizer.is_special(token_id):
                self._end_character()
                self._markup(token_id)
            else:
                self._take_text(token_id)

    def _enter(self, is_open: bool, tag: str) -> None:
        self._drop_blanks()
        following = _NEXT.get((self._state, is_open, tag))
        if following is None:
            return
        if self._state is _State.REASONING:
            if not is_open and tag in _CLOSERS_OF_CONTENT:
                self._resend_reasoning()
            self._reasoning.clear()
        self._state = following

    def _end_unmarked_reasoning(self) -> None:
        if self._state is _State.REASONING and not self._has_marker:
            self._resend_reasoning()
            self._reasoning.clear()

    def _resend_reasoning(self) -> None:
        text = "".join(self._reasoning)
        if text:
            self._out.append(Delta(Channel.CONTENT, text, (), is_resent=True))

    def _take_text(self, token_id: int) -> None:
        text = self._detokenizer.push((token_id,))
        self._pending_ids.append(token_id)
        if text:
            self._emit(text)

    def _end_character(self) -> None:
        text = self._detokenizer.flush()
        if text or self._pending_ids:
            self._emit(text)

    def _emit(self, text: str) -> None:
        ids = tuple(self._pending_ids)
        self._pending_ids.clear()
        if self._state is _State.PLAIN:
            self._out.append(Delta(Channel.TEXT, text, ids))
        elif self._state is _State.REASONING:
            self._reasoning.append(text)
            self._out.append(Delta(Channel.REASONING, text, ids))
        elif self._state is _State.RESPONSE:
            self._out.append(Delta(Channel.CONTENT, text, ids))
        elif self._state is _State.BETWEEN:
            self._emit_between(Delta(Channel.CONTENT, text, ids))
        else:
            self._markup(*ids)

    def _emit_between(self, delta: Delta) -> None:
        """Blank text between channels is no content; anything else is, with the blanks before and after it."""
        self._blanks.append(delta)
        if not delta.text.isspace():
            self._out += self._blanks
            self._blanks.clear()
            self._state = _State.RESPONSE

    def _drop_blanks(self) -> None:
        blanks, self._blanks = self._blanks, []
        for delta in blanks:
            self._markup(*delta.token_ids)

    def _markup(self, *token_ids: int) -> None:
        if token_ids:
            (self._blanks or self._out).append(Delta(Channel.MARKUP, "", token_ids))
