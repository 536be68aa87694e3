"""Compiles grammars within bounds of time and size, and keeps the latest ones."""

import threading
from collections import OrderedDict

from perilune.config.engine import LLGUIDANCE
from perilune.errors import RequestError
from perilune.grammar.backends.library import Library, Matcher, Refusal, load_library
from perilune.grammar.matcher import GrammarState
from perilune.grammar.sandbox import Sandbox, TookTooMuch
from perilune.grammar.spec import Grammar
from perilune.grammar.trial import MAX_MEMORY_BYTES
from perilune.text.tokenizer import Tokenizer

MAX_CACHED = 128
MAX_CACHED_BYTES = 64 * 1024 * 1024
# Processor time of a trial: what nearly every grammar needs at most, and what one may take at all.
QUICK_CPU_S = 0.1
MAX_CPU_S = 1.0


class NotQuick(Exception):
    """A grammar needs more time than those that others should wait for."""


class GrammarCompiler:
    """Turns grammars into states for requests; every method may be called from any thread, also side by side.

    `vocab_size` is the model's, which may be larger than the tokenizer's. `library` is the name of the one
    that compiles.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, library: str = LLGUIDANCE):
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._sandbox = Sandbox(tokenizer, vocab_size, library)
        self._lock = threading.Lock()
        self._name = library
        self._library: Library | None = None
        self._results: OrderedDict[tuple[str, ...], Matcher | Refusal] = OrderedDict()
        self._num_bytes = 0

    def warm_up(self) -> None:
        """Read the vocabulary here and in the process for trials, which the first compilation would otherwise do."""
        self._sandbox.start()
        self._loaded()

    def compile(self, grammar: Grammar, *, is_quick: bool = False) -> GrammarState:
        """The state of a request at its beginning; RequestError, naming the field, for what cannot be compiled.

        With `is_quick` NotQuick is raised for a grammar that does not compile in a tenth of a second.
        """
        # a refusal names the fields
        key = (grammar.source, *(part.field for part in grammar.parts))
        with self._lock:
            result = self._results.get(key)
            if result is not None:
                self._results.move_to_end(key)
        if result is None:
            result = self._judge(grammar, is_quick) or self._loaded().build(grammar.source)
            self._keep(key, result)
        if isinstance(result, Refusal):
            raise RequestError(result.message, param=result.field)
        state = GrammarState(result.deep_copy(), grammar.gate, self._tokenizer, self.vocab_size)
        error = state.begin(grammar.prefix)
        if error is not None:
            field = grammar.parts[0].field if grammar.parts else None
            raise RequestError(
                f"the beginning of the answer that messages ends with does not fit {field}", param="messages"
            )
        return state

    def _judge(self, grammar: Grammar, is_quick: bool) -> Refusal | None:
        try:
            return self._sandbox.judge(grammar, QUICK_CPU_S if is_quick else MAX_CPU_S)
        except TookTooMuch:
            if is_quick:
                raise NotQuick from None
            field = grammar.parts[0].field if grammar.parts else None
            return Refusal(
                f"{field or 'what constrains the answer'} takes more than {MAX_CPU_S:g} s of processor time or "
                f"{MAX_MEMORY_BYTES // 2**20} MiB to compile, which is the limit: make it simpler",
                field,
            )

    def _keep(self, key: tuple[str, ...], result: Matcher | Refusal) -> None:
        with self._lock:
            if key in self._results:
                return
            self._results[key] = result
            self._num_bytes += len(key[0])
            while len(self._results) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                oldest, _ = self._results.popitem(last=False)
                self._num_bytes -= len(oldest[0])

    def _loaded(self) -> Library:
        with self._lock:
            if self._library is None:
                self._library = load_library(self._name, self._tokenizer, self.vocab_size)
            return self._library
