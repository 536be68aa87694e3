"""Compiles grammars within bounds of time and size, and keeps the latest ones."""

import re
import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from perilune.errors import RequestError
from perilune.grammar.matcher import GrammarState
from perilune.grammar.spec import Grammar, Part
from perilune.text.tokenizer import Tokenizer

MAX_CACHED = 128
MAX_CACHED_BYTES = 64 * 1024 * 1024

# Bounds of a compilation and of one step. Fuel is the library's own measure: 50,000 units of the first kind and
# 14,000 of the second take it about a millisecond.
_INITIAL_FUEL = 2_000_000
_STEP_FUEL = 200_000


# "at 1(8): failed to compile JSON schema: REASON 1 | start: ..."
_AROUND_REASON = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?| \d+ \| .*$")


class _Vocabulary:
    """What llguidance wants to know of a tokenizer; ids past its end are control tokens that nothing ever allows."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.eos_token_id = tokenizer.end_of_msg_id
        padding = range(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.tokens += [f"<|padding_{token_id}|>".encode() for token_id in padding]
        self.special_token_ids = list(range(tokenizer.num_ranks, vocab_size))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


class GrammarCompiler:
    """Turns grammars into states for requests; every method may be called from any thread.

    `vocab_size` is the model's, which may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_bytes = 0
        self._limits = LLParserLimits(
            initial_lexer_fuel=_INITIAL_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            precompute_large_lexemes=False,
            verbose_errors=False,
        )

    def warm_up(self) -> None:
        """Read the vocabulary, which the first compilation would otherwise do."""
        with self._lock:
            self._read_vocabulary()

    def compile(self, grammar: Grammar) -> GrammarState:
        """The state of a request at its beginning; RequestError, naming the field, for what cannot be compiled."""
        with self._lock:
            matcher = self._compiled.get(grammar.source)
            if matcher is None:
                matcher = self._compile(grammar)
                self._keep(grammar.source, matcher)
            self._compiled.move_to_end(grammar.source)
            state = GrammarState(matcher.deep_copy(), grammar.gate, self._tokenizer, self.vocab_size)
        error = state.begin(grammar.prefix)
        if error is not None:
            field = grammar.parts[0].field if grammar.parts else None
            raise RequestError(
                f"the beginning of the answer that messages ends with does not fit {field}", param="messages"
            )
        return state

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._read_vocabulary(), grammar.source, log_level=0, limits=self._limits)
        for part in grammar.parts if matcher.is_error() else grammar.parts[:1]:
            self._check(part)
        if matcher.is_error():
            field = grammar.parts[0].field if grammar.parts else None
            raise RequestError(f"the grammar for {field} cannot be compiled: {_reason(matcher)}", param=field)
        return matcher

    def _check(self, part: Part) -> None:
        """Refuse a part that is no grammar, or that no text at all satisfies."""
        matcher = LLMatcher(self._read_vocabulary(), part.source, log_level=0, limits=self._limits)
        if not matcher.is_error() and not any(matcher.compute_bitmask()):
            raise RequestError(f"{part.field} cannot be satisfied by any answer", param=part.field)
        if matcher.is_error():
            raise RequestError(f"{part.field} is not supported: {_reason(matcher)}{part.advice}", param=part.field)

    def _keep(self, source: str, matcher: LLMatcher) -> None:
        self._compiled[source] = matcher
        self._num_bytes += len(source)
        while len(self._compiled) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
            oldest, _ = self._compiled.popitem(last=False)
            self._num_bytes -= len(oldest)

    def _read_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            vocabulary = TokenizerWrapper(_Vocabulary(self._tokenizer, self.vocab_size))
            self._vocabulary = LLTokenizer(vocabulary, eos_token=list(self._tokenizer.eos_token_ids))
        return self._vocabulary


def _reason(matcher: LLMatcher) -> str:
    """The library's own words, on one line and without the grammar around them."""
    words = " ".join(matcher.get_error().split())
    return _AROUND_REASON.sub("", words)[:300]
