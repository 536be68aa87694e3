"""Where one request stands in its grammar, and which tokens may come next."""

import ctypes
from collections.abc import Sequence
from copy import copy

from perilune.grammar.backends.library import Matcher
from perilune.grammar.spec import Gate
from perilune.text.tokenizer import Tokenizer

_FREED_BY = {Gate.ANSWER: (), Gate.THINKING: (b"think",), Gate.TOOLS: (b"think", b"response")}


class GrammarState:
    """Follows the tokens of one request; lives as long as the request, so that a preemption does not touch it.

    Not to be used by two threads at once. Once `error` says something no token is allowed any more.
    """

    def __init__(self, matcher: Matcher, gate: Gate, tokenizer: Tokenizer, vocab_size: int):
        self.error: str | None = None
        self._matcher = matcher
        self._gate = gate
        self._tokenizer = tokenizer
        self._is_free = gate is not Gate.ANSWER
        self._tag: bytearray | None = None  # of the tag that has just been opened
        self._without_end = _all_but(tokenizer.eos_token_ids, vocab_size) if gate is Gate.THINKING else None

    @property
    def constrains(self) -> bool:
        """Whether some token is not allowed next."""
        return not self._is_free or self._without_end is not None

    def begin(self, token_ids: Sequence[int]) -> str | None:
        """Take the beginning of the answer from the prompt; says why if it does not fit."""
        for token_id in token_ids:
            self.advance(token_id)
        return self.error

    def fork(self) -> "GrammarState":
        """The same place in the grammar, from which to go on by guesses; not behind an error."""
        fork = copy(self)
        fork._matcher = self._matcher.deep_copy()
        fork._tag = None if self._tag is None else bytearray(self._tag)
        return fork

    def fill(self, address: int, num_bytes: int) -> None:
        """Write the mask of the next token to memory: one bit per id of the vocabulary, lowest first; 1 is allowed.

        Sets `error`, and writes nothing, where no token is allowed.
        """
        if self._is_free:
            assert self._without_end is not None
            assert len(self._without_end) == num_bytes
            ctypes.memmove(address, self._without_end, num_bytes)
            return
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
            self._check()

    def advance(self, token_id: int) -> None:
        """Take the token that was chosen; sets `error` if it was not allowed."""
        if self._is_free and not self._binds(token_id):
            return
        self._is_free = False
        self._matcher.consume_token(token_id)
        self._check()
        self._follow_tag(token_id)

    def _binds(self, token_id: int) -> bool:
        is_closer = token_id == self._tokenizer.close_id and self._gate is Gate.THINKING
        if token_id == self._tokenizer.open_id:
            self._tag = bytearray()
        return is_closer or token_id == self._tokenizer.open_id

    def _follow_tag(self, token_id: int) -> None:
        """An opened tag that is not what the grammar is about gives the answer free again."""
        if self._tag is None or token_id == self._tokenizer.open_id:
            return
        if token_id != self._tokenizer.sep_id:
            self._tag += self._tokenizer.token_bytes(token_id)
            return
        if bytes(self._tag) in _FREED_BY[self._gate]:
            self._matcher.reset()
            self._is_free = True
        self._tag = None

    def _check(self) -> None:
        if self._matcher.is_error():
            self.error = " ".join(self._matcher.get_error().split())[:300]


def _all_but(token_ids: Sequence[int], vocab_size: int) -> bytes:
    mask = bytearray(b"\xff" * ((vocab_size + 31) // 32 * 4))
    for token_id in token_ids:
        mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask)
