"""What names a prefix: a chain of keys over its tokens and pictures, one per block, each made of the one before.

Equal keys mean equal prefixes under equal salts, whoever computed them; a key of the middle of a block names the
prefix that ends there.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack

KEY_BYTES = 16


@dataclass(frozen=True)
class ContentSpan:
    """Tokens `start` to `end - 1` stand for other content than their ids say; equal digests mean equal content."""

    start: int
    end: int
    digest: bytes


class PrefixChain:
    """The keys of one sequence. `token_ids` may grow after this; what is there does not change.

    Requests with different salts share nothing.
    """

    def __init__(
        self, token_ids: Sequence[int], block_size: int, salt: str | None = None, spans: Sequence[ContentSpan] = ()
    ):
        self._token_ids = token_ids
        self._block_size = block_size
        self._spans = spans
        self._keys = [blake2b(b"" if salt is None else b"salt" + salt.encode(), digest_size=KEY_BYTES).digest()]

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def key(self, num_tokens: int) -> bytes:
        """The key of the first `num_tokens` tokens; of none, that of the salt alone."""
        num_blocks, rest = divmod(num_tokens, self._block_size)
        while len(self._keys) <= num_blocks:
            self._keys.append(self._next_key(len(self._keys) * self._block_size))
        return self._next_key(num_tokens) if rest else self._keys[num_blocks]

    def payload(self, num_tokens: int) -> bytes:
        """All that the key of `num_tokens` tokens says about the block that the last of them is in."""
        first = self._block_start(num_tokens)
        ids = array("I", self._token_ids[first:num_tokens]).tobytes()
        spans = b"".join(
            pack("<qH", first - span.start, len(span.digest)) + span.digest
            for span in self._spans
            if span.start < num_tokens and span.end > first
        )
        return pack("<I", num_tokens - first) + ids + spans

    def _next_key(self, num_tokens: int) -> bytes:
        parent = self._keys[self._block_start(num_tokens) // self._block_size]
        return blake2b(parent + self.payload(num_tokens), digest_size=KEY_BYTES).digest()

    def _block_start(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self._block_size * self._block_size
