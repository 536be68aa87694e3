"""llguidance: the vocabulary that it is given, and the bounds of its work.

Fuel is the library's own measure of work: 50,000 units of the first kind and 14,000 of the second take it about a
millisecond. Fuel does not bound everything that a grammar can make it do; `trial` does.
"""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from perilune.text.tokenizer import Tokenizer

_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


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


class Guidance:
    """llguidance with the vocabulary of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._vocabulary = read_vocabulary(tokenizer, vocab_size)

    def build(self, source: str) -> LLMatcher:
        """A matcher at the beginning of `source`; one that is no grammar is in its error state."""
        return LLMatcher(self._vocabulary, source, log_level=0, limits=_LIMITS)
