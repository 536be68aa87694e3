"""Generated ids to shown text: detokenised, split by channel, ended by stop strings.

The engine decides with this class whether a stop string has ended a request and the server builds its text with it,
so both have the same answer.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from perilune.text.channels import Channel, Delta, merge_deltas
from perilune.text.parser import ChannelParser
from perilune.text.stop import StopMatcher
from perilune.text.tokenizer import Tokenizer


class TextStream:
    """One generation. Stop strings are looked for in content (or text without channels), never in reasoning or tool
    calls, and not across a call.

    Without `has_calls` (no tools, or none are to be called) what looks like a tool call is markup.

    `stopped` is the stop string that ended the text, or None; later ids are ignored. A token is handed out when all
    its text is safe to show; the tokens of a stop string come as markup.
    """

    def __init__(
        self, tokenizer: Tokenizer, start_channel: Channel, stop: tuple[str, ...] = (), *, has_calls: bool = False
    ):
        self._has_calls = has_calls
        self.stopped: str | None = None
        self._parser = ChannelParser(tokenizer, start_channel)
        self._matcher = StopMatcher(stop) if stop else None
        self._held: deque[Delta] = deque()
        self._num_released = 0  # characters handed out since the matcher began
        self._num_safe = 0  # characters the matcher has let go
        self._out: list[Delta] = []

    def push(self, ids: Iterable[int]) -> list[Delta]:
        """What these ids add, neighbours of one channel joined."""
        for token_id in ids:
            if self.stopped is not None:
                break
            self._take(self._parser.push((token_id,)))
        return self._drain()

    def flush(self, finish: str | None = None) -> list[Delta]:
        """The rest, at the end of a generation that finished with "stop", "length" or otherwise."""
        if self.stopped is None:
            self._take(self._parser.flush(finish))
        if self.stopped is None:
            self._release_held()
        return self._drain()

    def _drain(self) -> list[Delta]:
        out, self._out = self._out, []
        if not self._has_calls:
            out = [_markup(delta) if delta.channel is Channel.TOOLS else delta for delta in out]
        return merge_deltas(out)

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if self._matcher is None:
                self._out.append(delta)
            elif self.stopped is not None:
                self._hide(delta)
            elif delta.channel in (Channel.REASONING, Channel.TOOLS):
                self._release_held()
                self._out.append(delta)
            else:
                self._match(self._matcher, delta)

    def _match(self, matcher: StopMatcher, delta: Delta) -> None:
        safe, self.stopped = matcher.push(delta.text)
        self._num_safe += len(safe)
        self._held.append(delta)
        while self._held and self._num_released + len(self._held[0].text) <= self._num_safe:
            self._release(self._held.popleft())
        if self.stopped is not None:
            self._release_before_stop()

    def _release_before_stop(self) -> None:
        for delta in self._held:
            num_shown = self._num_safe - self._num_released
            if delta.is_resent or (num_shown > 0 and delta.text):
                self._release(replace(delta, text=delta.text[:num_shown]))
            else:
                self._hide(delta)
        self._held.clear()

    def _release_held(self) -> None:
        if self._matcher is not None:
            self._num_safe += len(self._matcher.flush())
        while self._held:
            self._release(self._held.popleft())

    def _release(self, delta: Delta) -> None:
        self._num_released += len(delta.text)
        self._out.append(delta)

    def _hide(self, delta: Delta) -> None:
        if delta.token_ids:
            self._out.append(_markup(delta))


def _markup(delta: Delta) -> Delta:
    return Delta(Channel.MARKUP, "", delta.token_ids)
