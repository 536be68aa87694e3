"""The room that a context has for a prompt, and proof that a prompt cannot fit before any of it is encoded."""

from collections import Counter

from perilune.errors import RequestError
from perilune.text.tokenizer import Tokenizer

# So much text is encoded whole even where it does not fit, so that the error tells how many tokens it has.
TOLD_EXACTLY_BYTES = 256 * 1024


class Room:
    """Adds up the pieces of one prompt for a context of `num_tokens`.

    No token has more bytes than the longest one of the vocabulary, and no piece has less than one token; a prompt
    that both leave too long is refused at once. With `counts_only` that is all, and what is merely too long for the
    context is counted; else encoding may stop at `at_most` tokens.
    """

    def __init__(self, num_tokens: int, tokenizer: Tokenizer, *, counts_only: bool = False):
        self._num_tokens = num_tokens
        self._max_token_bytes = tokenizer.max_token_bytes
        self._counts_only = counts_only
        self._num_pieces = 0
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()

    @property
    def at_most(self) -> int | None:
        """As many tokens as are worth encoding; None for all of them."""
        return None if self._counts_only or self._num_bytes <= TOLD_EXACTLY_BYTES else self._num_tokens

    def take(self, text: str, field: str) -> None:
        """Add a piece that stands in `field`; RequestError, naming the largest field, once there is too much."""
        if not text:
            return
        num_bytes = len(text.encode())
        self._num_pieces += 1
        self._num_bytes += num_bytes
        self._bytes_of[field] += num_bytes
        most = self._num_tokens * self._max_token_bytes
        if self._num_bytes > most:
            raise self._refusal(
                f"holds at most {most} bytes of text ({self._max_token_bytes} for a token), and the prompt has more"
            )
        if self._num_pieces > self._num_tokens:
            raise self._refusal("is too small for the prompt, which has more pieces than that")

    def check(self, num_tokens: int) -> None:
        """Refuse a prompt of which so many tokens have been encoded, if that was given up at `at_most`."""
        if self.at_most is not None and num_tokens > self.at_most:
            raise self._refusal("is too small for the prompt, which has more")

    def _refusal(self, problem: str) -> RequestError:
        field = self._bytes_of.most_common(1)[0][0]
        return RequestError(
            f"the context of {self._num_tokens} tokens {problem}: shorten the prompt, most of all {field} "
            f"({self._bytes_of[field]} bytes)",
            param=field,
            code="context_length_exceeded",
        )
