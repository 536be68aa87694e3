"""xgrammar, for who prefers it or compares: the extra `xgrammar`. Its view of a tokenizer, and its matcher."""

import ctypes
import json
import re
from typing import Any

import numpy as np

from perilune.grammar.backends.dialect import NotHeld, in_dialect
from perilune.text.tokenizer import Tokenizer

# no text holds this byte, so that only a grammar that names a control token allows it
_NO_TEXT = b"\xff"
# "[14:50:53] /project/cpp/json_schema_converter.cc:5082: REASON"
_ORIGIN = re.compile(r"\[[\d:]+\] \S+\.cc:\d+: ")


class Xgrammar:
    """xgrammar with the vocabulary of one tokenizer; ids past its end are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        # an extra, which need not be installed where this module is read
        import xgrammar

        words = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_ranks)]
        words += [_NO_TEXT + str(token_id).encode() for token_id in range(tokenizer.num_ranks, vocab_size)]
        info = xgrammar.TokenizerInfo(words, vocab_size=vocab_size, stop_token_ids=list(tokenizer.eos_token_ids))
        self._xgrammar = xgrammar
        self._num_words = (vocab_size + 31) // 32
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def build(self, source: str) -> "XgrammarMatcher":
        """A matcher at the beginning of `source`; one that is no grammar is in its error state."""
        try:
            dialect = in_dialect(source)
            # one blank at most between the signs of JSON, so that no answer consists of blanks
            schemas = {
                name: self._xgrammar.Grammar.from_json_schema(json.dumps(schema), max_whitespace_cnt=1)
                for name, schema in dialect.schemas.items()
            }
            compiled = self._compiler.compile_lark(dialect.lark, named_grammars={**dialect.grammars, **schemas})
        except NotHeld as held:
            return XgrammarMatcher(None, self._num_words, f"xgrammar does not hold answers to {held}")
        except RuntimeError as error:
            words = _ORIGIN.sub("", str(error)).partition("\n")[0]
            return XgrammarMatcher(None, self._num_words, f"xgrammar says: {words}")
        return XgrammarMatcher(self._xgrammar.GrammarMatcher(compiled), self._num_words)


class XgrammarMatcher:
    """A place in a grammar, or an error."""

    def __init__(self, matcher: Any, num_words: int, error: str = ""):
        self._matcher = matcher
        self._num_words = num_words
        self._error = error

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def compute_bitmask(self) -> bytes:
        mask = np.zeros((1, self._num_words), np.int32)
        self._fill(mask)
        return mask.tobytes()

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int, /) -> None:
        words = (ctypes.c_int32 * (num_bytes // 4)).from_address(address)
        self._fill(np.ctypeslib.as_array(words).reshape(1, -1))

    def _fill(self, mask: "np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> None:
        if self._matcher is not None and not self._error:
            self._matcher.fill_next_token_bitmask(mask)

    def consume_token(self, token_id: int, /) -> bool:
        if self._matcher is None or self._error:
            return False
        if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            self._error = f"token {token_id} is not allowed here"
        return not self._error

    def deep_copy(self) -> "XgrammarMatcher":
        copy = None if self._matcher is None else self._matcher.fork()
        return XgrammarMatcher(copy, self._num_words, self._error)

    def reset(self) -> None:
        if self._matcher is not None:
            self._matcher.reset()
            self._error = ""
