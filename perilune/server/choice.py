"""One answer in the making: the outputs of one engine request turned into text by channel, and counted."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from perilune.engine.request import GenerateRequest, RequestOutput, TokenLogprob
from perilune.server.calls import CallIds
from perilune.text.channels import Channel, Delta, merge_deltas
from perilune.text.stream import TextStream
from perilune.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """Text of one channel with the log-probabilities of its tokens, which are empty unless asked for.

    `marker_ids` are the tokens without text that came before those of the piece itself.
    A piece of a tool call has a `call_id` when it is the first one of that call.
    Without text and without log-probabilities it only says that the earlier reasoning was the content, of which a stop
    string has left nothing.
    """

    delta: Delta
    logprobs: tuple[TokenLogprob, ...]
    call_id: str | None = None
    marker_ids: tuple[int, ...] = ()

    @property
    def channel(self) -> Channel:
        return self.delta.channel

    @property
    def text(self) -> str:
        return self.delta.text

    @property
    def is_end_of_call(self) -> bool:
        return self.delta.call is not None and self.delta.call.is_end


class Choice:
    """Follows one engine request from its first output to its last.

    Without `call_ids` there are no tool calls: none was possible, so nothing is taken for one.
    """

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, call_ids: CallIds | None = None):
        has_calls = call_ids is not None
        self._stream = TextStream(tokenizer, request.start_channel, request.params.stop, has_calls=has_calls)
        self._call_ids = call_ids
        self._num_ended_calls = 0
        self._logprobs: deque[TokenLogprob] = deque()
        self._marker_ids: list[int] = []
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def push(self, output: RequestOutput) -> list[Piece]:
        """What one output adds; neighbouring tokens of one channel come as one piece."""
        self.num_output_tokens = output.num_output_tokens
        if self.num_output_tokens == len(output.token_ids):
            # told in the headers of the answer already, so it stays
            self.num_cached_tokens = output.num_cached_tokens
        self._logprobs.extend(output.logprobs or ())
        deltas = self._stream.push(output.token_ids)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason.value, output.stop_reason
            deltas = [*deltas, *self._stream.flush(self.finish_reason)]
            if self._stream.stopped is not None:
                self.finish_reason, self.stop_reason = "stop", self._stream.stopped
        pieces = list(self._pieces(deltas))
        self._num_ended_calls += sum(piece.is_end_of_call for piece in pieces)
        if self.finish_reason == "stop" and self._stream.stopped is None and self._num_ended_calls:
            self.finish_reason = "tool_calls"
        return pieces

    def _pieces(self, deltas: Iterable[Delta]) -> Iterator[Piece]:
        for delta in merge_deltas(deltas):
            num_tokens = min(len(delta.token_ids), len(self._logprobs))
            logprobs = tuple(self._logprobs.popleft() for _ in range(num_tokens))
            if delta.is_resent:
                self.num_reasoning_tokens = 0
            elif delta.channel is Channel.REASONING:
                self.num_reasoning_tokens += len(delta.token_ids)
            name = delta.call.name if delta.call else None
            if delta.channel is not Channel.MARKUP and (delta.text or logprobs or name or delta.is_resent):
                call_id = self._call_ids.next(name) if self._call_ids and name else None
                yield Piece(delta, logprobs, call_id, tuple(self._marker_ids))
                self._marker_ids.clear()
            else:
                self._marker_ids += delta.token_ids


def usage(choices: Sequence[Choice], n: int) -> dict[str, object]:
    """The token counts of a whole answer; the prompt behind `n` choices counts once."""
    num_prompt_tokens = sum(choice.num_prompt_tokens for choice in choices[::n])
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in choices[::n])},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices)},
    }


def usage_headers(choices: Sequence[Choice], n: int) -> dict[str, str]:
    """The counts of the prompt, which are known before the first byte of an answer."""
    return {
        "x-msh-usage-prompt-tokens": str(sum(choice.num_prompt_tokens for choice in choices[::n])),
        "x-msh-usage-cached-tokens": str(sum(choice.num_cached_tokens for choice in choices[::n])),
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""One token for display; bytes that are no text of their own are spelled \xNN, so that tokens stay distinct."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")
