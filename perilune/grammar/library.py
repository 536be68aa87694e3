"""What llguidance is given and what it says: the vocabulary, the bounds of its work, its reasons.

Fuel is the library's own measure of work: 50,000 units of the first kind and 14,000 of the second take it about a
millisecond. Fuel does not bound everything that a grammar can make it do; `trial` does.
"""

import re
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from perilune.grammar.spec import Grammar, Part
from perilune.text.tokenizer import Tokenizer

_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)

# "at 1(8): failed to compile JSON schema: REASON 1 | start: ..."
_AROUND_REASON = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?| \d+ \| .*$")


@dataclass(frozen=True)
class Refusal:
    """Why a grammar is not taken, and the field of the request that is to blame."""

    message: str
    field: str | None


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


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """The library's view of a tokenizer; takes it half a second for the released one."""
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)), eos_token=list(tokenizer.eos_token_ids))


def build(vocabulary: LLTokenizer, source: str) -> LLMatcher:
    """A matcher at the beginning of `source`; one that is no grammar is in its error state."""
    return LLMatcher(vocabulary, source, log_level=0, limits=_LIMITS)


def judge(vocabulary: LLTokenizer, grammar: Grammar) -> Refusal | None:
    """Why `grammar` cannot be used; None if it can."""
    matcher = build(vocabulary, grammar.source)
    for part in grammar.parts if matcher.is_error() else grammar.parts[:1]:
        refusal = _judge_part(vocabulary, part)
        if refusal is not None:
            return refusal
    if matcher.is_error():
        field = grammar.parts[0].field if grammar.parts else None
        return Refusal(f"the grammar for {field} cannot be compiled: {reason(matcher)}", field)
    return None


def _judge_part(vocabulary: LLTokenizer, part: Part) -> Refusal | None:
    """Refuses a part that is no grammar, or that no text at all satisfies."""
    matcher = build(vocabulary, part.source)
    if not matcher.is_error() and not any(matcher.compute_bitmask()):
        return Refusal(f"{part.field} cannot be satisfied by any answer", part.field)
    if matcher.is_error():
        return Refusal(f"{part.field} is not supported: {reason(matcher)}{part.advice}", part.field)
    return None


def reason(matcher: LLMatcher) -> str:
    """The library's own words, on one line and without the grammar around them."""
    words = " ".join(matcher.get_error().split())
    return _AROUND_REASON.sub("", words)[:300]
