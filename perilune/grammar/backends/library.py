"""What the package asks of the library that compiles grammars, and which libraries there are."""

import re
from dataclasses import dataclass
from typing import Protocol

from perilune.config.engine import LLGUIDANCE
from perilune.grammar.spec import Grammar, Part
from perilune.text.tokenizer import Tokenizer

# "at 1(8): failed to compile JSON schema: REASON 1 | start: ..."
_AROUND_REASON = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?| \d+ \| .*$")

# llguidance of a $ref that leads back to itself
_ENDLESS = "NoExtensionBias"


@dataclass(frozen=True)
class Refusal:
    """Why a grammar is not taken, and the field of the request that is to blame."""

    message: str
    field: str | None


class Matcher(Protocol):
    """A place in a grammar. The names are llguidance's, whose own matcher is one."""

    def is_error(self) -> bool:
        """Whether the source is no grammar, or a token was taken that it does not allow."""

    def get_error(self) -> str:
        """Why, in the library's own words."""

    def compute_bitmask(self) -> bytes:
        """The tokens that may come next: one bit per id, lowest first."""

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int, /) -> None:
        """The same, written to memory."""

    def consume_token(self, token_id: int, /) -> bool:
        """Go on by one token."""

    def deep_copy(self) -> "Matcher":
        """The same place, independent of this one."""

    def reset(self) -> object:
        """Back to the beginning."""


class Library(Protocol):
    """A library that has read the vocabulary of one tokenizer; may be used by several threads."""

    def build(self, source: str) -> Matcher:
        """A matcher at the beginning of `source`; one that is no grammar is in its error state."""


def load_library(name: str, tokenizer: Tokenizer, vocab_size: int) -> Library:
    """The library of that name (`EngineConfig.grammar_backend`); it takes it half a second to read a vocabulary."""
    if name == LLGUIDANCE:
        from perilune.grammar.backends.guidance import Guidance

        return Guidance(tokenizer, vocab_size)
    from perilune.grammar.backends.xgrammar import Xgrammar

    return Xgrammar(tokenizer, vocab_size)


def judge(library: Library, grammar: Grammar) -> Refusal | None:
    """Why `grammar` cannot be used; None if it can."""
    matcher = library.build(grammar.source)
    for part in grammar.parts if matcher.is_error() else grammar.parts[:1]:
        refusal = _judge_part(library, part)
        if refusal is not None:
            return refusal
    if matcher.is_error():
        field = grammar.parts[0].field if grammar.parts else None
        return Refusal(f"the grammar for {field} cannot be compiled: {reason(matcher)}", field)
    return None


def _judge_part(library: Library, part: Part) -> Refusal | None:
    """Refuses a part that is no grammar, or that no text at all satisfies."""
    matcher = library.build(part.source)
    if not matcher.is_error() and not any(matcher.compute_bitmask()):
        return Refusal(f"{part.field} cannot be satisfied by any answer", part.field)
    if matcher.is_error():
        return Refusal(f"{part.field} is not supported: {reason(matcher)}{part.advice}", part.field)
    return None


def reason(matcher: Matcher) -> str:
    """The library's own words, on one line and without the grammar around them."""
    words = " ".join(matcher.get_error().split())
    if words.startswith(_ENDLESS):
        return "it refers to itself, and nothing else says what it is"
    return _AROUND_REASON.sub("", words)[:300]
