"""Splits generated token ids into reasoning, content and tool calls.

Driven by ids: only the real control tokens act, text that merely spells one stays text. Told its start state, never
guesses it; never raises; shows whatever text it cannot place rather than losing it, except between tool calls. Text
without channels shows the markers by name, so that whoever asked for raw text can read the format in it.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, auto

from perilune.text.calls import CallWriter
from perilune.text.channels import CallPart, Channel, Delta
from perilune.text.header import Header
from perilune.text.tokenizer import Detokenizer, Tokenizer


class _State(Enum):
    PLAIN = auto()  # no channels at all
    REASONING = auto()
    BETWEEN = auto()
    RESPONSE = auto()
    TOOLS = auto()
    CALL = auto()
    ARG = auto()
    JSON = auto()
    DONE = auto()


_START: Mapping[Channel, _State] = {
    Channel.TEXT: _State.PLAIN,
    Channel.REASONING: _State.REASONING,
    Channel.CONTENT: _State.RESPONSE,
    Channel.TOOLS: _State.TOOLS,
}

_OUTSIDE_CALLS = (_State.REASONING, _State.BETWEEN, _State.RESPONSE)
_IN_CALL = (_State.CALL, _State.ARG, _State.JSON)

# (state, is_open, tag) -> next state; every other known tag is a marker without effect.
_NEXT: Mapping[tuple[_State, bool, str], _State] = {
    (_State.REASONING, False, "think"): _State.BETWEEN,
    (_State.REASONING, False, "response"): _State.BETWEEN,
    (_State.RESPONSE, False, "response"): _State.BETWEEN,
    (_State.TOOLS, False, "tools"): _State.BETWEEN,
    (_State.CALL, True, "argument"): _State.ARG,
    (_State.CALL, True, "json"): _State.JSON,
    (_State.ARG, True, "argument"): _State.ARG,
    (_State.ARG, False, "argument"): _State.CALL,
    (_State.JSON, True, "argument"): _State.ARG,
    (_State.JSON, False, "json"): _State.CALL,
    **{(state, False, "message"): _State.DONE for state in (*_OUTSIDE_CALLS, _State.TOOLS, *_IN_CALL)},
    **{(state, True, "response"): _State.RESPONSE for state in (*_OUTSIDE_CALLS, _State.TOOLS, *_IN_CALL)},
    **{(state, True, "tools"): _State.TOOLS for state in (*_OUTSIDE_CALLS, *_IN_CALL)},
    **{(state, True, "call"): _State.CALL for state in (*_OUTSIDE_CALLS, _State.TOOLS, *_IN_CALL)},
    **{(state, False, "call"): _State.TOOLS for state in _IN_CALL},
    **{(state, False, "tools"): _State.BETWEEN for state in _IN_CALL},
}

# Closing these while still in the reasoning shows that the model answered without thinking.
_CLOSERS_OF_CONTENT = ("response", "message")


class ChannelParser:
    """Turns one generation's ids into deltas: one per token, or more tokens where they share a character.

    Without any marker a generation that started in the reasoning and stopped by itself was an answer, and so was one
    that closes a response or message it never opened. The reasoning has been handed out by then; its text is given
    once more as content, marked `is_resent`, so that the content is whole however the deltas are read.

    A tool call begins with a delta that holds its name, goes on with its arguments as they come, and ends with one
    marked `is_end`. That one is missing where the generation was cut inside the call.
    """

    def __init__(self, tokenizer: Tokenizer, start: Channel):
        self._tokenizer = tokenizer
        self._state = _START[start]
        self._openers = (tokenizer.open_id, tokenizer.close_id)
        self._detokenizer = Detokenizer(tokenizer)
        self._pending_ids: list[int] = []  # their bytes do not make a character yet
        self._header: Header | None = None
        self._has_marker = False
        self._reasoning: list[str] = []
        self._call: CallWriter | None = None  # also none inside a call that is dropped
        self._num_calls = 0
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
        if self._state is _State.PLAIN:
            self._end_character()
            text = self._tokenizer.decode((token_id,), skip_special=True)
            self._out.append(Delta(Channel.TEXT, text, (token_id,)))
        elif not (is_end or token_id in self._openers or self._header):
            self._end_character()
            self._markup(token_id)
        elif token_id in self._openers:
            self._end_header()
            self._end_character()
            self._has_marker = True
            self._header = Header(token_id == self._tokenizer.open_id, [token_id])
        elif is_end:
            self._end_header()
            self._end_character()
            self._end_unmarked_reasoning()
            self._drop_blanks()
            self._move(_State.DONE, (token_id,))
        elif self._header is not None:
            self._header.token_ids.append(token_id)
            if token_id == self._tokenizer.sep_id:
                self._end_header(has_sep=True)

    def _collect(self, header: Header, token_id: int) -> None:
        header.token_ids.append(token_id)
        header.raw += self._tokenizer.token_bytes(token_id)
        if header.is_too_long:
            self._header = None
            self._release(header)

    def _end_header(self, *, has_sep: bool = False, is_last: bool = False) -> None:
        """Act on a collected header; one that ran into the next marker without its separator counts too."""
        header, self._header = self._header, None
        if header is None:
            return
        tag = header.tag(has_sep=has_sep)
        if tag is not None and not (is_last and header.is_open):
            self._enter(header, tag)
        elif has_sep or (is_last and header.can_become_tag):
            self._markup(*header.token_ids)
        else:
            self._release(header)

    def _release(self, header: Header) -> None:
        """The marker was a stray one: drop it and keep what followed as text."""
        for token_id in header.token_ids:
            if self._tokenizer.is_special(token_id):
                self._end_character()
                self._markup(token_id)
            else:
                self._take_text(token_id)

    def _enter(self, header: Header, tag: str) -> None:
        self._drop_blanks()
        following = _NEXT.get((self._state, header.is_open, tag))
        is_call = header.is_open and tag == "call"
        attributes = header.attributes if header.is_open else {}
        is_stray = is_call and self._state in _OUTSIDE_CALLS and not attributes.get("tool")
        if following is None or is_stray:
            self._markup(*header.token_ids)
            return
        if self._state is _State.REASONING:
            if not header.is_open and tag in _CLOSERS_OF_CONTENT:
                self._resend_reasoning()
            self._reasoning.clear()
        if is_call:
            self._move(_State.TOOLS)
            self._begin_call(attributes.get("tool"), header.token_ids)
        else:
            self._move(following, tuple(header.token_ids), attributes)

    def _begin_call(self, name: str | None, token_ids: list[int]) -> None:
        """A call without a name is dropped, with all that it holds."""
        self._state = _State.CALL
        if not name:
            self._markup(*token_ids)
            return
        self._call = CallWriter(self._num_calls)
        self._num_calls += 1
        part = CallPart(self._call.index, name)
        self._out.append(Delta(Channel.TOOLS, "", tuple(token_ids), call=part))

    def _move(
        self, following: _State, token_ids: tuple[int, ...] = (), attributes: Mapping[str, str] | None = None
    ) -> None:
        """Go to another state; what that adds to the arguments of a call takes the ids, else they are markup."""
        self._state = following
        call, text = self._call, ""
        if call is None:
            self._markup(*token_ids)
            return
        is_end = following not in _IN_CALL
        if is_end:
            text = call.close()
            self._call = None
        else:
            text = call.end_value()
        if following is _State.ARG:
            text += call.begin_argument(attributes or {})
        elif following is _State.JSON:
            call.begin_block()
        self._emit_arguments(call, text, token_ids, is_end=is_end)

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
        elif self._call is not None:
            self._emit_arguments(self._call, self._call.push(text), ids)
        else:
            self._markup(*ids)

    def _emit_arguments(self, call: CallWriter, text: str, token_ids: tuple[int, ...], *, is_end: bool = False) -> None:
        if text:
            self._out.append(Delta(Channel.TOOLS, text, token_ids, call=CallPart(call.index, is_end=is_end)))
        else:
            self._markup(*token_ids)

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
